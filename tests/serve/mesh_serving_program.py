"""Run by test_mesh_serving.py on four pretended CPU devices: prints one JSON line a case."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model

from headrace.errors import ConfigError
from headrace.kernels.paged import PagedRows, PagedShape, empty_pages, paged_attention
from headrace.kernels.paged_sharded import page_spec, paged_attention_on_mesh
from headrace.serve import Engine, EngineOptions, SamplingParams
from headrace.sharding import MeshConfig, make_mesh

PROMPTS = [[5, 9, 200, 17, 33, 8, 4, 91, 12] * 5, [7, 7, 300, 41]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHAPED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3)


def shallow_llama() -> Any:
    """One layer of the tiny Llama, quick to compile without a loop."""
    model = tiny_llama()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


def generated(model: Any, **settings: Any) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    found: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


def adapter(folder: str) -> None:
    torch.manual_seed(1)
    tuned: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    tuned.save_pretrained(folder)


def share(array: Any) -> float:
    """The part of an array that one device holds."""
    return array.addressable_shards[0].data.nbytes / array.nbytes


def served(model: Any, size: int, *, folder: str | None = None) -> dict[str, Any]:
    options = EngineOptions(
        max_model_len=96,
        max_num_seqs=1,
        page_size=4,
        max_batched_tokens=32,
        tensor_parallel_size=size,
        roll=folder is not None,
        warm_up=False,
    )
    adapters = {} if folder is None else {"a": folder}
    with Engine(model, options=options, adapters=adapters) as engine:
        tokens = {"plain": engine.generate(PROMPTS, GREEDY)}
        if folder is not None:
            tokens["shaped"] = engine.generate(PROMPTS, SHAPED)
            tokens["adapted"] = engine.generate(PROMPTS, GREEDY, adapter="a")
        engine.check_invariants()
        pages = next(iter(engine._runner.programs.pages.values()))
        weights = {k: v for k, v in engine.model.params.items() if "q_proj" in k}
        return {
            "tokens": {k: [a[0].token_ids for a in v] for k, v in tokens.items()},
            "devices": len(pages[0].sharding.device_set),
            "pages": share(pages[0]),
            "weights": share(next(iter(weights.values()))),
        }


def kernels_agree() -> float:
    """The largest difference between paged attention on a mesh and on one device."""
    worst = 0.0
    for num_kv, size, stored in [(2, 2, "int8"), (2, 4, "auto")]:
        mesh = make_mesh(MeshConfig(tensor=size), jax.devices()[:size])
        shape = PagedShape(
            layers=1,
            num_pages=5,
            page_size=4,
            num_kv_heads=num_kv,
            key_size=8,
            value_size=8,
            dtype=jnp.dtype("float32"),
            kv_cache_dtype=stored,  # pyright: ignore[reportArgumentType]
        )
        rows = PagedRows(
            positions_T=jnp.array([0, *range(6), -1, -1]),
            slots_T=jnp.array([4, *range(8, 14), 0, 0]),
            tables_RM=jnp.array([[1, 0], [2, 3]]),
            num_decode=1,
            block=8,
        )
        q, k, v = (
            jax.random.normal(jax.random.key(i), (9, n, 8))
            for i, n in enumerate((4, num_kv, num_kv))
        )
        options: dict[str, Any] = {"scale": 0.3, "window": 4, "sinks_N": jnp.arange(4.0)}
        pages, spec = empty_pages(shape, "gather"), page_spec(shape, "gather", mesh)
        on_mesh = partial(paged_attention_on_mesh, mesh, spec)
        (alone, kept), (divided, own) = (
            jax.jit(partial(attend, rows=rows, **options))(pages, q, k, v)
            for attend in (paged_attention, on_mesh)
        )
        for one, other in [(alone, divided), *zip(kept, own, strict=True)]:
            apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
            worst = max(worst, float(apart.max()))
    return worst


def main() -> None:
    assert len(jax.devices()) == 4
    print(json.dumps({"kernels": kernels_agree()}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        adapter(folder)
        tuned: Any = PeftModel.from_pretrained(tiny_llama(), folder).eval()
        want = {
            "plain": generated(tiny_llama()),
            "shaped": generated(tiny_llama(), repetition_penalty=1.3),
            "adapted": generated(tuned),
            "shallow": generated(shallow_llama()),
        }
        two = served(tiny_llama(), 2, folder=folder)
    four = served(shallow_llama(), 4)
    print(json.dumps({"two": two, "four": four, "want": want}), flush=True)
    try:
        served(tiny_llama(), 3)
    except ConfigError as error:
        print(json.dumps({"three": str(error)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
