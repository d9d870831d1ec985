"""How far plans are from measured runs.

Every row is a published run with its configuration as far as it is public. The analytic model
answers for all of them at once; `--compile` also compiles Headrace's own step for the rows that one
slice can hold (3 to 15 minutes each on 2 cores, cached) and replays it. Published runs used other
programs (MaxText's kernels, remat policies and flags), so a compiled row compares Headrace's
program with theirs; the paper's row is compiled as the paper ran it: tensor parallel, dense
attention, dense loss, padded rows.

    python benchmarks/plan_accuracy.py                      # analytic, all rows, a second
    python benchmarks/plan_accuracy.py --compile --rows paper,llama-8b-v6e
    python benchmarks/plan_accuracy.py --memory             # analytic against compiled

Sources: tpu-recipes training/{trillium,v5p,ironwood} and MaxText docs/reference/models/tiering.md
(read 2026-11-21); arXiv:2605.25645 for the paper.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "examples" / "planning"


@dataclass(frozen=True, kw_only=True)
class Published:
    """measured: positions a second and chip, padding included. comparable: why it may not be."""

    name: str
    model: str
    slice_name: str
    mesh: dict[str, int]
    rows: int  # of each device that rows are divided over
    length: int
    measured: float
    accumulation: int = 1
    remat: str = "dots"
    lora: int = 0
    flags: str = "overlap"
    paper: bool = False
    compiles: bool = False
    remark: str = ""


RUNS = (
    Published(
        name="paper", model="gemma-4-31b", slice_name="v5p-8", mesh={"tensor": 4}, rows=1,
        accumulation=8, length=3072, lora=64, remat="full", flags="default", paper=True,
        measured=763 / 0.30 / 4, compiles=True,
        remark="763 real tokens/s; rows of 922 tokens padded to 3,072",
    ),
    Published(
        name="llama-8b-v6e", model="llama-3.1-8b", slice_name="v6e-8", mesh={"fsdp": 8}, rows=3,
        length=8192, measured=7140, compiles=True, flags="overlap-vmem", remat="full",
        remark="offloads activations to the host; published 7,032 to 7,247",
    ),
    Published(
        name="mistral-7b-v6e", model="mistral-7b", slice_name="v6e-8", mesh={"fsdp": 8}, rows=6,
        length=8192, measured=7777, compiles=True, flags="overlap-vmem", remat="full",
        remark="offloads activations to the host",
    ),
    Published(
        name="llama-70b-v6e", model="llama-3.1-70b", slice_name="v6e-32", mesh={"fsdp": 32},
        rows=2, length=8192, measured=921, remark="rows a device not published, 2 assumed",
    ),
    Published(
        name="gemma3-12b-v6e", model="gemma-3-12b", slice_name="v6e-256", mesh={"fsdp": 256},
        rows=1, length=32768, measured=4478, remark="rows a device not published, 1 assumed",
    ),
    Published(
        name="llama2-70b-v5p", model="llama-2-70b", slice_name="v5p-1024", mesh={"fsdp": 512},
        rows=4, length=4096, measured=692, remark="rows a device not published, 4 assumed",
    ),
    Published(
        name="gemma4-31b-v7x", model="gemma-4-31b", slice_name="v7x-128", mesh={"fsdp": 128},
        rows=4, length=8192, measured=5371, remark="512 rows on 64 chips",
    ),
    Published(
        name="llama-70b-v7x", model="llama-3.1-70b", slice_name="v7x-128", mesh={"fsdp": 128},
        rows=2, length=8192, measured=2687, remark="256 rows on 64 chips",
    ),
)  # fmt: skip
MEMORY_RUNS = (
    # model, slice, mesh, rows, length, remat, LoRA rank (0: all weights)
    ("gemma-2b", "v5e-1", {}, 2, 2048, "full", 16),
    ("gemma-2b", "v5e-1", {}, 1, 2048, "dots", 16),
    ("gemma-2b", "v5e-8", {"fsdp": 8}, 1, 4096, "full", 0),
    ("llama-3.1-8b", "v5e-8", {"fsdp": 8}, 1, 4096, "full", 16),
    ("llama-3.1-8b", "v5e-8", {"fsdp": 4, "tensor": 2}, 1, 4096, "full", 16),
    ("llama-3.1-8b", "v5p-8", {"fsdp": 4}, 2, 4096, "full", 0),
    ("llama-3.1-8b", "v6e-8", {"fsdp": 8}, 3, 8192, "full", 0),
    ("mistral-7b", "v5p-8", {"fsdp": 4}, 1, 4096, "none", 16),
    ("gemma-3-12b", "v5p-8", {"fsdp": 4}, 1, 4096, "full", 32),
    ("gemma-4-31b", "v5p-8", {"fsdp": 4}, 1, 4096, "full", 64),
)
LEFT_OUT = (
    "Llama 3.1 405B on v5p and v7x: slice or rows a device not published in full",
    "16B to 128B on v5e-256: architectures and rows not published, older FLOP rule",
    "TRL + FSDP on 2 x H100 (486 tokens/s): eager PyTorch, not a program that is planned here",
    "Qwen3 mixture-of-experts on v7x: routing is not in the analytic model's time",
)


def subject(run: Published) -> Any:
    from headrace.config import TrainConfig
    from headrace.plan.planner import read_subject

    settings: dict[str, Any] = {"model_name_or_path": str(MODELS / run.model), "dtype": "bfloat16"}
    if run.lora:
        settings |= {"use_peft": True, "lora_r": run.lora}
        settings["lora_dropout"] = 0.05 if run.paper else 0.0
    return read_subject(TrainConfig(**settings))


def candidate(run: Published) -> Any:
    from headrace.plan.candidate import Candidate

    return Candidate(
        slice_name=run.slice_name, mesh=run.mesh, batch_size=run.rows, length=run.length,
        accumulation=run.accumulation, packing=False, remat=run.remat, flags=run.flags,
    )  # fmt: skip


@contextlib.contextmanager
def as_the_paper_ran() -> Generator[None]:
    """Dense attention and a loss that holds all logits, in place of Headrace's kernels."""
    from headrace.plan import program

    kernels: Any = importlib.import_module("headrace.kernels.attention")  # not the function
    choose, loss = kernels._choose, program.causal_loss
    kernels._choose = lambda *given: "dense"
    program.causal_loss = lambda module, **given: loss(module, fused=False, **given)
    try:
        yield
    finally:
        kernels._choose, program.causal_loss = choose, loss


def compiled(run: Published, folder: Path) -> dict[str, Any]:
    """The report of Headrace's own step, or of the paper's form of it; kept in `folder`."""
    stored = folder / f"{run.name}.json"
    if stored.is_file():
        return json.loads(stored.read_text())
    from headrace.plan.compiled import compile_candidate
    from headrace.plan.program import capture_model

    form = as_the_paper_ran() if run.paper else contextlib.nullcontext()
    captured = capture_model(subject(run).config)
    with form:
        report = compile_candidate(
            captured,
            candidate(run),
            say=lambda text: print(f"  {run.name}: {text}", file=sys.stderr),
        )
    folder.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(report))
    return report


def memory_sweep(folder: Path) -> None:
    """Analytic against compiled memory; a minute or more each on a quiet machine, kept."""
    from headrace.plan.planner import analytic_plan

    print("| model | slice, mesh | rows | remat | LoRA | analytic GiB | compiled GiB | error |")
    print("|---|---|---|---|---|---|---|---|")
    for model, slice_name, mesh, rows, length, remat, lora in MEMORY_RUNS:
        parts = "-".join(f"{k}{v}" for k, v in mesh.items())
        run = Published(
            name=f"memory-{model}-{slice_name}-{parts}-{rows}-{length}-{remat}-{lora}",
            model=model, slice_name=slice_name, mesh=mesh, rows=rows, length=length, remat=remat,
            lora=lora, measured=0.0, flags="default",
        )  # fmt: skip
        plan = analytic_plan(subject(run), candidate(run))
        total = compiled(run, folder)["hbm_bytes_per_chip"]
        print(
            f"| {model} | {slice_name} {parts} | {rows}x{length} | {remat} | {lora or 'no'} "
            f"| {plan.hbm_bytes / 2**30:.2f} | {total / 2**30:.2f} "
            f"| {plan.hbm_bytes / total - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile rows that one slice holds")
    parser.add_argument("--rows", default="", help="names, comma separated; all without")
    parser.add_argument("--folder", default="out/plan_accuracy", help="compiled reports go here")
    parser.add_argument("--memory", action="store_true", help="memory of ten configurations")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from headrace.plan.planner import analytic_plan
    from headrace.plan.topology import prepare_environment

    prepare_environment()
    if given.memory:
        memory_sweep(Path(given.folder))
        return
    wanted = [r for r in RUNS if not given.rows or r.name in given.rows.split(",")]
    print("| run | published tok/s/chip | analytic | error | compiled | error | remark |")
    print("|---|---|---|---|---|---|---|")
    for run in wanted:
        plan = analytic_plan(subject(run), candidate(run))
        chips = plan.hardware.num_chips
        quick = plan.padded_tokens_per_second / chips
        cells = ["", ""]
        known = (Path(given.folder) / f"{run.name}.json").is_file()
        if run.compiles and (given.compile or known):
            report = compiled(run, Path(given.folder))
            if "seconds" in report:
                rate = plan.candidate.step_positions / report["seconds"] / chips
                cells = [f"{rate:,.0f}", f"{rate / run.measured - 1:+.0%}"]
            else:
                cells = ["does not fit", ""]
        print(
            f"| {run.name} | {run.measured:,.0f} | {quick:,.0f} | {quick / run.measured - 1:+.0%} "
            f"| {cells[0]} | {cells[1]} | {run.remark} |"
        )
    for line in LEFT_OUT:
        print(f"\nleft out: {line}", end="")
    print()


if __name__ == "__main__":
    main()
