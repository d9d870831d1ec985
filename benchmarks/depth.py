"""What depth costs: capture, JAX trace + XLA compilation, and memory of a step, for 4 to 32 layers.

A Llama shape, full fine-tuning gradient, remat `full`. Repeated layers run as one loop, so the
program and its compilation do not grow with depth; torch.export follows every layer's Python and
does.

    python benchmarks/depth.py --layers 4 8 16 32
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr

HIDDEN, BATCH, LENGTH = 256, 4, 512


def measure(layers: int) -> dict[str, float]:
    """Seconds of each stage, bytes of temporaries of the compiled gradient."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    start = time.perf_counter()
    jm = hr.to_jax(model, {"input_ids": ids})
    captured = time.perf_counter()
    shapes = {k: stored_shape(names, model) for k, names in jm.layout.keys.items()}
    buffers = {
        k: jax.ShapeDtypeStruct(stored_shape(n, model).shape, np.float32)
        for k, n in jm.buffer_layout.keys.items()
    }
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)

    def loss(params: Any, buffers: Any, ids: Any) -> Any:
        outputs, _ = jm.apply(params, buffers, input_ids=ids, remat="full")
        return (outputs.logits**2).mean()

    lowered = jax.jit(jax.grad(loss)).lower(shapes, buffers, tokens)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    gradients = sum(np.prod(s.shape) * 4 for s in shapes.values())
    return {
        "capture": captured - start,
        "trace": traced - captured,
        "compile": done - traced,
        "temporaries": float(memory.temp_size_in_bytes),
        "gradients": float(gradients),
        "program": float(len(lowered.as_text())),
    }


def stored_shape(names: tuple[str, ...], model: Any) -> jax.ShapeDtypeStruct:
    """Shape of a stored tensor: the PyTorch one, with a leading axis when layers are stacked."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lead = (len(names),) if len(names) > 1 else ()
    return jax.ShapeDtypeStruct((*lead, *tensors[names[0]].shape), np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 8, 16, 32])
    options = parser.parse_args()
    measure(2)  # imports and first-call costs
    titles = f"{'layers':>6}{'capture s':>11}{'trace s':>9}{'compile s':>11}"
    print(f"{titles}{'program kB':>12}{'temp MB':>9}{'MB a layer':>12}")
    before: tuple[int, float] | None = None
    for layers in options.layers:
        m = measure(layers)
        total = m["temporaries"] / 2**20
        grown = "" if before is None else f"{(total - before[1]) / (layers - before[0]):.2f}"
        before = (layers, total)
        times = f"{m['capture']:11.1f}{m['trace']:9.1f}{m['compile']:11.1f}"
        print(f"{layers:6}{times}{m['program'] / 1e3:12.0f}{total:9.1f}{grown:>12}", flush=True)
    hidden = BATCH * LENGTH * HIDDEN * 4 / 2**20
    print(f"one hidden state [{BATCH}, {LENGTH}, {HIDDEN}] is {hidden:.2f} MB")


if __name__ == "__main__":
    main()
