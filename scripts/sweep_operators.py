#!/usr/bin/env python3
"""Run every OpInfo sample of PyTorch through the operator rules and write docs/operators.md.

    scripts/sweep_operators.py run --results build/ops.jsonl [--slice 0/2] [--samples 8] [NAME ...]
    scripts/sweep_operators.py errors --results build/op_errors.jsonl
    scripts/sweep_operators.py report --results build/ops.jsonl build/op_errors.jsonl ...

`errors` asks which of the calls that PyTorch refuses are refused here before anything is computed.

Results are appended operator by operator, so an interrupted run continues where it stopped; an
operator that was begun twice and never finished is reported as a crash. One slice needs one core;
six samples a dtype take a quarter of an hour on two.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX starts
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "bridge" / "ops"))

SECONDS_PER_CASE = 60
GOOD = ("passed", "rounding")
# Where the difference is not ours.
REMARKS = {
    "as_strided_scatter": "PyTorch's own gradient fails torch.autograd.gradcheck",
    "linalg.svd": "full_matrices leaves the columns beyond the rank free",
}
NOT_COUNTED = ("absent", "refused")


class CaseTimeoutError(BaseException):
    """One case ran too long; not an Exception, so that no handler takes it for a failure."""


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise CaseTimeoutError


def _read(paths: list[Path]) -> list[dict[str, Any]]:
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def run(results: Path, part: str, limit: int | None, patterns: list[str]) -> None:
    """Run the operators of one slice that are not finished yet."""
    import torch
    from opinfo_cases import DTYPES, cases, operators, run_case

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _alarm)
    index, count = (int(x) for x in part.split("/"))
    results.parent.mkdir(parents=True, exist_ok=True)
    begun = Counter(r["op"] for r in _read([results]) if r.get("state") == "begun")
    done = {r["op"] for r in _read([results]) if r.get("state") == "done"}
    chosen = [(n, i) for k, (n, i) in enumerate(operators().items()) if k % count == index]
    if patterns:
        chosen = [(n, i) for n, i in chosen if any(fnmatch.fnmatch(n, p) for p in patterns)]
    with results.open("a") as file:

        def write(**record: Any) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        for name, info in chosen:
            if name in done or begun[name] >= 2:
                continue
            write(op=name, state="begun")
            for dtype in (d for d in DTYPES if d in info.dtypes):
                backward = info.supports_autograd and dtype in info.backward_dtypes
                signal.alarm(SECONDS_PER_CASE)
                number = -1
                try:
                    for _, number, sample in cases(info, limit, [dtype]):
                        signal.alarm(SECONDS_PER_CASE)
                        ahead, back = run_case(info, sample, backward)
                        write(
                            op=name,
                            dtype=str(dtype).removeprefix("torch."),
                            sample=number,
                            forward=[ahead.verdict, ahead.reason],
                            backward=[back.verdict, back.reason] if back else None,
                        )
                except (Exception, CaseTimeoutError) as error:
                    signal.alarm(0)
                    reason = f"sample {max(number, 0)}: {type(error).__name__}: {error}"[:200]
                    write(
                        op=name,
                        dtype=str(dtype).removeprefix("torch."),
                        sample=max(number, 0),
                        forward=["error", reason],
                        backward=None,
                    )
                signal.alarm(0)
            write(op=name, state="done")


def errors(results: Path, patterns: list[str]) -> None:
    """Where each call that PyTorch refuses is refused; replaces the file."""
    from opinfo_cases import error_samples, operators, refused_by

    logging.disable(logging.CRITICAL)  # PyTorch logs every meta kernel that fails
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("w") as file:
        for name, info in operators().items():
            if patterns and not any(fnmatch.fnmatch(name, p) for p in patterns):
                continue
            for number, wrong in enumerate(error_samples(info)):
                where = refused_by(info, wrong.sample_input)
                why = str(wrong.error_regex)[:200]
                record = {"op": name, "wrong": number, "refused_by": where, "why": why}
                file.write(json.dumps(record) + "\n")


def _wrong_calls(records: list[dict[str, Any]]) -> list[str]:
    """The section about calls that PyTorch refuses."""
    wrong = [r for r in records if "wrong" in r]
    if not wrong:
        return []
    where = Counter(r["refused_by"] for r in wrong)
    accepted: dict[tuple[str, str], int] = Counter(
        (r["op"], r["why"].replace("\\", "")) for r in wrong if not r["refused_by"]
    )
    return [
        "## Calls that PyTorch refuses",
        "",
        f"Of {len(wrong)} wrong calls in OpInfo, {where['capture']} are refused by PyTorch itself "
        f"while the model is captured and {where['rule']} by a rule or for the lack of one; "
        f"{where['']} are accepted: what is wrong with them is a value, which a compiled program "
        "does not look at, an `out=` tensor, or a 64-bit dtype.",
        "",
        "| operator | accepted | PyTorch's message |",
        "|---|--:|---|",
        *(f"| {op} | {n} | {why.replace('|', '/')} |" for (op, why), n in sorted(accepted.items())),
        "",
    ]


def _tally(records: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Counter[str]]]:
    """Per operator the counts of each direction's verdicts, and reasons of failures."""
    counts: dict[str, Any] = defaultdict(lambda: {"forward": Counter(), "backward": Counter()})
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    latest = {(r["op"], r["dtype"], r["sample"]): r for r in records if "sample" in r}
    for record in latest.values():
        for direction in ("forward", "backward"):
            if record[direction] is None:
                continue
            verdict, reason = record[direction]
            counts[record["op"]][direction][verdict] += 1
            if verdict not in GOOD:
                note = f"{direction} {record['dtype']}: {verdict}: {reason}"
                reasons[record["op"]][note] += 1
    finished = {r["op"] for r in records if r.get("state") == "done"}
    for name in {r["op"] for r in records if r.get("state") == "begun"} - finished:
        counts[name]["forward"]["crash"] += 1
        reasons[name]["forward: the process died"] += 1
    return counts, reasons


def _score(counter: Counter[str]) -> tuple[int, int]:
    total = sum(n for verdict, n in counter.items() if verdict not in NOT_COUNTED)
    return sum(counter[v] for v in GOOD), total


def report(paths: list[Path], target: Path) -> None:
    """Write the table from the results."""
    import jax
    import torch

    from headrace.bridge.ops.registry import rules

    everything = _read(paths)
    records = [r for r in everything if "wrong" not in r]
    counts, reasons = _tally(records)
    most = 1 + max(record.get("sample", 0) for record in records)
    totals = {
        direction: [
            sum(values)
            for values in zip(*(_score(c[direction]) for c in counts.values()), strict=True)
        ]
        for direction in ("forward", "backward")
    }
    rounding = sum(c[d]["rounding"] for c in counts.values() for d in ("forward", "backward"))
    refused = sum(c["forward"]["refused"] for c in counts.values())
    absent = sum(c["forward"]["absent"] for c in counts.values())
    families = Counter(rule.family for rule in rules())
    lines = [
        "# Operators",
        "",
        "Generated by `scripts/sweep_operators.py` from its result files; do not edit. "
        "Results are kept per operator, so a row is as old as that operator's last run.",
        "",
        f"{len(list(rules()))} ATen overloads have a rule. PyTorch {torch.__version__}'s OpInfo "
        f"samples (float32, bfloat16, int64, bool) were run through the rules under `jax.jit` (JAX "
        f"{jax.__version__}, CPU) and compared with PyTorch: values at torch.testing's default "
        "tolerances, dtype, shape and gradients. "
        f"At most {most} samples an operator and dtype, spread over all it has. Operators that "
        "draw random numbers or return uninitialised memory are compared in dtype and shape only; "
        "sorting operators get inputs without ties, whose order PyTorch leaves open.",
        "",
        "| | agree | of | share |",
        "|---|--:|--:|--:|",
        *(
            f"| {direction} | {good} | {total} | {100 * good / max(total, 1):.1f} % |"
            for direction, (good, total) in totals.items()
        ),
        "",
        f"Of these, {rounding} comparisons differ in 16 or 32 bits beyond the tolerance and "
        "agree when both sides run in float64: rounding. "
        f"Not counted: {refused} samples whose result shape depends on values (XLA cannot compile "
        f"them; they are refused with a message) and {absent} that PyTorch itself cannot trace.",
        "",
        "Overloads with a rule, by family: "
        + ", ".join(f"{family} {n}" for family, n in sorted(families.items()))
        + ".",
        "",
        "## What does not agree",
        "",
        "| operator | forward | backward | why |",
        "|---|--:|--:|---|",
    ]
    clean = []
    for name, count in sorted(counts.items()):
        (ahead, of), (back, back_of) = _score(count["forward"]), _score(count["backward"])
        if ahead == of and back == back_of:
            clean.append((name, ahead, of, back, back_of, count["forward"]))
            continue
        why = [
            n for n, _ in reasons[name].most_common() if "refused" not in n and "absent" not in n
        ]
        text = why[0].replace("|", "\\|").replace("\n", " ")[:150] if why else ""
        text = f"{REMARKS[name]}; {text}" if name in REMARKS else text
        more = f" (+{len(why) - 1} more)" if len(why) > 1 else ""
        lines.append(f"| {name} | {ahead}/{of} | {back}/{back_of} | {text}{more} |")
    lines += ["", *_wrong_calls(everything)]
    lines += ["## What agrees", "", "| operator | forward | backward | |", "|---|--:|--:|---|"]
    for name, ahead, of, back, back_of, verdicts in clean:
        note = f"{verdicts['refused']} refused" if verdicts["refused"] else ""
        note = note or ("not run by PyTorch's tracer" if not of else "")
        lines.append(
            f"| {name} | {ahead}/{of} | {f'{back}/{back_of}' if back_of else '-'} | {note} |"
        )
    target.write_text("\n".join(lines) + "\n")
    for direction, (good, total) in totals.items():
        print(f"{direction}: {good}/{total} = {100 * good / max(total, 1):.2f} %")
    print(f"rounding {rounding}, refused {refused}, absent {absent}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("run", "errors", "report"))
    parser.add_argument("names", nargs="*", help="operators to run, with * and ?; default: all")
    parser.add_argument("--results", type=Path, nargs="+", required=True)
    parser.add_argument("--slice", default="0/1", help="i/n: the i-th of n parts")
    parser.add_argument("--samples", type=int, default=8, help="a dtype; 0: all of them")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "operators.md")
    chosen = parser.parse_intermixed_args()
    if chosen.action == "report":
        report(chosen.results, chosen.output)
    elif chosen.action == "errors":
        errors(chosen.results[0], chosen.names)
    else:
        run(chosen.results[0], chosen.slice, chosen.samples or None, chosen.names)


if __name__ == "__main__":
    main()
