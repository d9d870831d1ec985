"""Host time of a compiled step beyond `jax.jit`'s own: `python benchmarks/step_overhead.py`.

One step of a model with 500 parameter tensors. Interleaved: a call of the compiled step, then a
call of the same jitted function in a plain loop (`state = f(state, ...)`) on its own arrays.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import headrace as hr


def main() -> None:
    """Print a table of medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'optimizer':<10} {'arrays':>7} {'whole us':>9} {'jit us':>9} {'beyond us':>10}")
    for name in ("SGD", "AdamW"):
        arrays, whole, inner = measure(name, arguments.tensors, arguments.calls)
        beyond = [w - i for w, i in zip(whole, inner, strict=True)]
        row = [statistics.median(x) * 1e6 for x in (whole, inner, beyond)]
        print(f"{name:<10} {arrays:>7} {row[0]:>9.0f} {row[1]:>9.0f} {row[2]:>10.0f}")


def measure(name: str, tensors: int, calls: int) -> tuple[int, list[float], list[float]]:
    """Number of state arrays, seconds of each whole call, seconds of the jitted call in it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(tensors // 2)))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = hr.compile_step(train_step, model=model, optimizer=optimizer)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    start = time.perf_counter()
    step(x, y).item()
    print(f"{name}: traced and compiled in {time.perf_counter() - start:.1f} s")
    (compiled,) = next(iter(step._programs.values()))
    program = compiled.program
    donated, kept = step._gather(compiled)
    donated, kept = [jnp.copy(a) for a in donated], [jnp.copy(a) for a in kept]
    arrays, numbers = [x.numpy(), y.numpy()], program.numbers(*step._numbers(step._inventory))
    state = list(donated)
    whole: list[float] = []
    inner: list[float] = []
    for call in range(calls):
        # taking turns at being first: what runs second finds the other's arrays in the cache
        for turn in ("whole", "inner") if call % 2 else ("inner", "whole"):
            begin = time.perf_counter()
            if turn == "whole":
                loss = step(x, y)
                whole.append(time.perf_counter() - begin)
                loss.item()
            else:
                state = program.run(
                    state[: program.num_donated], [*kept, *arrays], numbers, np.uint32(0)
                )
                inner.append(time.perf_counter() - begin)
                np.asarray(state[-1]).item()
    return len(program.written), whole[20:], inner[20:]


if __name__ == "__main__":
    main()
