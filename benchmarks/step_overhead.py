"""Host time of a compiled step beyond `jax.jit`'s own: `python benchmarks/step_overhead.py`.

One step of a model with 500 parameter tensors. In turns: a call of the compiled step, and a call of
the jitted function inside it in a plain loop (`state = f(state, ...)`) on its own arrays. Then the
same against the step as one would write it in JAX, with an array for each tensor. Times are the
calling thread's CPU time until the call returns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import headrace as hr
from headrace.bridge.step import packs


def main() -> None:
    """Print a table of medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    print(
        f"{'optimizer':<10} {'mode':<13} {'arrays':>6} {'whole us':>9} {'jit us':>7} {'beyond':>7}"
        f" | {'an array a tensor':>17} {'whole us':>9} {'jit us':>7} {'beyond':>7}"
    )
    for name in ("SGD", "AdamW"):
        for mode in ("one_program", "two_programs"):
            report(name, mode, arguments.tensors, arguments.calls)


def report(name: str, mode: Any, tensors: int, calls: int) -> None:
    """One row: the whole call, the jitted functions in it, jit with an array a tensor."""
    begin = time.process_time()
    step, batch = make_step(name, mode, tensors)
    step(*batch).item()
    made = time.process_time() - begin
    limit, packs.LIMIT = packs.LIMIT, -1
    try:
        plain_step, _ = make_step(name, "one_program", tensors)
        plain_step(*batch).item()
    finally:
        packs.LIMIT = limit
    inner, arrays = plain_loop(step, batch)
    plain, plain_arrays = plain_loop(plain_step, batch)
    whole, inner_us = in_turns(lambda: step(*batch), inner, calls)
    again, plain_us = in_turns(lambda: step(*batch), plain, calls)
    print(
        f"{name:<10} {mode:<13} {arrays:>6} {whole:>9.0f} {inner_us:>7.0f} {whole - inner_us:>7.0f}"
        f" | {plain_arrays:>17} {again:>9.0f} {plain_us:>7.0f} {again - plain_us:>7.0f}"
        f"   (traced and compiled in {made:.1f} s of CPU time)"
    )


def in_turns(
    first: Callable[[], Any], second: Callable[[], Any], calls: int
) -> tuple[float, float]:
    """Medians in microseconds of two functions that take turns, at being first as well."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in range(calls):
        # what runs second finds the other's arrays in the cache
        for turn in (0, 1) if call % 2 else (1, 0):
            begin = time.thread_time()
            loss = (first, second)[turn]()
            times[turn].append(time.thread_time() - begin)
            np.asarray(loss).item()
    return statistics.median(times[0][20:]) * 1e6, statistics.median(times[1][20:]) * 1e6


def make_step(name: str, mode: Any, tensors: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A compiled step of a deep model of small layers, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(tensors // 2)))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = hr.compile_step(train_step, model=model, optimizer=optimizer, mode=mode)
    return step, (torch.randn(2, 4), torch.randn(2, 4))


def plain_loop(step: Any, batch: tuple[torch.Tensor, ...]) -> tuple[Callable[[], Any], int]:
    """`state = f(state, ...)` with the step's jitted function, and how many arrays it gives."""
    (compiled,) = next(iter(step._programs.values()))
    program = compiled.program
    donated, kept = step._gather(compiled)
    state, kept = [jnp.copy(a) for a in donated], [jnp.copy(a) for a in kept]
    arrays, numbers = [t.numpy() for t in batch], program.numbers(*step._numbers(step._inventory))

    def call() -> Any:
        nonlocal state
        state = program.run(state[: program.num_donated], [*kept, *arrays], numbers, np.uint32(0))
        return state[-1]

    return call, len(program.written)


if __name__ == "__main__":
    main()
