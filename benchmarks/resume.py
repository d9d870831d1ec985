"""Seconds that going on from a checkpoint costs: the demo's recipe, killed and resumed.

    python benchmarks/resume.py [--recipe FILE] [--rounds 3] [--flag value ...]

Each round measures, from the start of the process to its first new step: a fresh start with all
caches warm, and a resumed one (checkpoint read, verified, and placed). The overhead is the
difference of the medians. Further flags go to `headrace train`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "reminders" / "lora.yaml"
SAVED = 10  # the step whose checkpoint is resumed


def seconds_to_step(command: list[str], step: int) -> float:
    """From the start of the process to the line of `step`; the process is ended then."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if re.match(rf"step {step}/", line):
            seconds = time.perf_counter() - start
            process.kill()
            process.wait()
            return seconds
    raise SystemExit(f"step {step} never came:\n{''.join(seen[-20:])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--rounds", type=int, default=3)
    args, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        headrace = Path(sys.executable).with_name("headrace")
        train = [
            str(headrace), "train", args.recipe, "--output_dir", str(out),
            "--save_strategy", "steps", "--save_steps", str(SAVED), "--logging_steps", "1",
            "--data_cache_dir", f"{folder}/data", "--compilation_cache_dir", f"{folder}/programs",
            *further,
        ]  # fmt: skip
        seconds_to_step(train, SAVED + 1)  # fills the caches, leaves the checkpoint
        saved = out / f"checkpoint-{SAVED}"
        size = sum(f.stat().st_size for f in saved.rglob("*") if f.is_file())
        fresh, resumed = list[float](), list[float]()
        elsewhere = [*train, "--output_dir", f"{folder}/fresh"]
        again = [*train, "--resume_from_checkpoint", str(saved)]
        for _ in range(args.rounds):  # in turn: both meet the same machine
            fresh.append(seconds_to_step(elsewhere, 1))
            resumed.append(seconds_to_step(again, SAVED + 1))
    print(f"checkpoint: {size / 2**20:.1f} MiB; seconds from process start to the first new step:")
    for name, values in (("fresh, caches warm", fresh), ("resumed", resumed)):
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"  {name:<20} {statistics.median(values):6.1f}   ({shown})")
    overhead = statistics.median(resumed) - statistics.median(fresh)
    print(f"  {'overhead of resuming':<20} {overhead:6.1f}")


if __name__ == "__main__":
    main()
