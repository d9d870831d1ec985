"""Capture and lowering of a deep model, and the same from the disk cache in a second process:
`python benchmarks/front_end.py`.

A Llama of 60 layers (narrow: neither time depends on the width). Each row is a process of its own;
imports are not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import jax
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr


def main() -> None:
    """Print seconds to build, capture and lower; first without and then with a kept capture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--cache", help="run one measurement with this capture cache")
    arguments = parser.parse_args()
    if arguments.cache:
        print(measure(arguments.layers, arguments.cache))
        return
    print(f"{'':<16} {'capture s':>10} {'lowering s':>11} {'both s':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for row in ("first process", "second process"):
            words = [sys.executable, __file__, "--layers", str(arguments.layers), "--cache", folder]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            print(f"{row:<16} {done.stdout.strip().splitlines()[-1]}")


def measure(layers: int, folder: str) -> str:
    """Capture the loss and lower its value and gradients, without compiling."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 256, (2, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    start = time.perf_counter()
    module = hr.to_jax(model, inputs, cache_dir=folder)
    captured = time.perf_counter()
    arrays = {k: v.numpy() for k, v in inputs.items()}
    params, buffers = module.params(), module.buffers()
    lowering = time.perf_counter()

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        return module.apply(given, buffers, **arrays)[0].loss

    jax.jit(jax.value_and_grad(loss)).lower(params)
    seconds = captured - start, time.perf_counter() - lowering
    return f"{seconds[0]:>10.2f} {seconds[1]:>11.2f} {sum(seconds):>8.2f}"


if __name__ == "__main__":
    main()
