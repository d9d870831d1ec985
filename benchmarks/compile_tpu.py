"""LoRA steps of large models, compiled by the real TPU compiler for slices that are not here.

No weights and no TPU: the model comes from its configuration, libtpu compiles for a topology.

    python benchmarks/compile_tpu.py                  # all
    python benchmarks/compile_tpu.py llama-8b         # one
    python benchmarks/compile_tpu.py --layers 4       # fewer layers, to look at the program

Prints seconds of capture and compilation, bytes a chip, what of it is weights, and the collectives
in the program. Needs `pip install libtpu`; about 3 minutes of CPU for the largest.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import topologies
from peft import LoraConfig, TaskType
from transformers import Gemma4TextConfig, LlamaConfig

from headrace.bridge.module import to_jax
from headrace.kernels import target_platform
from headrace.plan.topology import prepare_environment
from headrace.sharding import MeshConfig, make_mesh, make_partition, plan_params
from headrace.sharding.place import count_collectives
from headrace.train.abstract import abstract_batch, abstract_state, keep_layout, state_shardings
from headrace.train.lora import apply_lora
from headrace.train.losses import causal_loss
from headrace.train.memory import local_bytes
from headrace.train.optimizers import make_optimizer
from headrace.train.shapes import memory_use
from headrace.train.step import make_train_step
from headrace.weights import meta_model

GIB = 2**30


def gemma_31b(layers: int | None) -> Any:
    """Gemma 4 31B's text model, from its published configuration."""
    return Gemma4TextConfig(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=layers or 60,
        num_attention_heads=32, num_key_value_heads=16, head_dim=256, global_head_dim=512,
        num_global_key_value_heads=4, attention_k_eq_v=True, vocab_size=262144,
        sliding_window=1024, max_position_embeddings=262144, final_logit_softcapping=30.0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * ((layers or 60) // 6),
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, tie_word_embeddings=True,
        dtype="bfloat16",
    )  # fmt: skip


def llama(hidden: int, feed: int, depth: int, heads: int) -> Any:
    return lambda layers: LlamaConfig(
        hidden_size=hidden, intermediate_size=feed, num_hidden_layers=layers or depth,
        num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=500000.0, dtype="bfloat16",
    )  # fmt: skip


# name: (configuration, topology, mesh, rows a device, bytes of a chip)
CASES: dict[str, tuple[Any, str, dict[str, int], int, float]] = {
    "gemma4-31b": (gemma_31b, "v5p:2x2x1", {"fsdp": 4}, 1, 95e9),
    "llama-8b": (llama(4096, 14336, 32, 32), "v5e:2x4", {"fsdp": 8}, 1, 16e9),
    "llama-70b": (llama(8192, 28672, 80, 64), "v6e:4x4", {"fsdp": 16}, 1, 32e9),
}


def compile_case(
    name: str, *, layers: int | None, length: int, rank: int, remat: str, quantization: str | None
) -> None:
    make_config, topology, sizes, rows, chip = CASES[name]
    start = time.perf_counter()
    model, _ = apply_lora(
        meta_model(make_config(layers)),
        LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"),
        task_type=TaskType.CAUSAL_LM,
    )
    core = model.get_base_model().train()
    example = torch.zeros(2, 128, dtype=torch.int64)
    module = to_jax(core, {"input_ids": example, "position_ids": example})
    captured = time.perf_counter()
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    mesh_config = MeshConfig.parse(sizes, len(devices))
    mesh = make_mesh(mesh_config, devices)
    plans = plan_params(module, mesh_config)
    divided = module.on_mesh(make_partition(mesh, plans))
    optimizer = make_optimizer("adamw")
    state, frozen = abstract_state(
        divided, optimizer=optimizer, mesh=mesh, plans=plans, quantization=quantization
    )
    shape = (1, rows * mesh_config.batch_size, length)
    names = ("input_ids", "position_ids", "segment_ids", "labels")
    batch = abstract_batch({n: jax.ShapeDtypeStruct(shape, np.int32) for n in names}, mesh)
    step = make_train_step(
        causal_loss(divided, trainable=module.layout.trainable, remat=remat),
        optimizer,
        dtypes={key: plans[key].dtype for key in module.layout.trainable},
    )
    step = keep_layout(step, state_shardings(state, mesh, plans))
    with target_platform("tpu"):
        lowered = jax.jit(step, donate_argnums=0).lower(state, frozen, batch, np.float32(0))
    lowering = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = memory_use(compiled)
    assert memory is not None
    weights = local_bytes(frozen)
    print(f"{name} {core.config.num_hidden_layers} layers, {topology}, mesh {sizes}, {shape}")
    print(
        f"  capture {captured - start:.1f} s, lower {lowering - captured:.1f} s, "
        f"compile {done - lowering:.1f} s"
    )
    print(
        f"  a chip: {memory.peak / GIB:.2f} GiB of {chip / GIB:.1f} "
        f"({memory.peak / chip:.0%}); arguments {memory.arguments / GIB:.2f} (frozen weights "
        f"{weights / GIB:.2f}), temporary {memory.temporary / GIB:.2f} GiB"
    )
    print(f"  collectives in the program: {count_collectives(compiled.as_text())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--quantization", choices=["int8", "int4", "nf4"], default=None)
    given = parser.parse_args()
    prepare_environment()
    for name in given.names:
        compile_case(
            name,
            layers=given.layers,
            length=given.length,
            rank=given.rank,
            remat=given.remat,
            quantization=given.quantization,
        )


if __name__ == "__main__":
    main()
