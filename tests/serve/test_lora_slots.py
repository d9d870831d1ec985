"""Adapters in slots against PEFT, in one batch, loaded and unloaded while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model

from headrace.errors import AdapterError
from headrace.serve import Engine, EngineOptions, SamplingParams, capture_for_serving
from headrace.serve.answers import Collector
from headrace.serve.lora import LoraStacks, LoraTarget

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 9, 200, 17, 33, 8, 4, 91, 12], [7, 7, 300, 41], [5, 9, 200, 17, 33, 8, 4, 91, 13]]


def _adapter(folder: Path, seed: int, **changes: Any) -> Path:
    options: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    model = get_peft_model(tiny_llama(), LoraConfig(**(options | changes)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(str(folder))
    return folder


def _want(folder: Path, prompt: list[int]) -> list[int]:
    model: Any = PeftModel.from_pretrained(tiny_llama(), str(folder)).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=1)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    changes = [{}, {"r": 4, "use_rslora": True, "target_modules": "all-linear"}, {}]
    return [_adapter(root / f"a{i}", i, **c) for i, c in enumerate(changes)]


@pytest.fixture(scope="module", params=[False, True], ids=["unrolled", "loops"])
def lora_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    served = capture_for_serving(tiny_llama(), roll=request.param)
    options = EngineOptions(
        max_model_len=64,
        max_num_seqs=4,
        page_size=4,
        max_batched_tokens=32,
        max_loras=2,
        max_lora_rank=4,
        warm_up=False,
    )
    with Engine(served, options=options) as engine:
        yield engine


def test_adapters_share_a_batch_and_answer_as_peft_does(
    lora_engine: Engine, folders: list[Path]
) -> None:
    engine = lora_engine
    base = [a[0].token_ids for a in engine.generate(PROMPTS, GREEDY)]
    engine.load_adapter("one", folders[0])
    engine.load_adapter("two", folders[1])
    waiting: list[tuple[Any, Collector]] = []
    for prompt in PROMPTS:
        for name in ("one", "two", None):  # three names in one batch
            collector = Collector(1)
            engine.submit(prompt, GREEDY, collector, adapter=name)
            waiting.append((name, collector))
    got: dict[Any, list[Any]] = {"one": [], "two": [], None: []}
    for name, collector in waiting:
        got[name].append(collector.wait()[0].token_ids)
    assert got[None] == base
    assert got["one"] == [_want(folders[0], p) for p in PROMPTS]
    assert got["two"] == [_want(folders[1], p) for p in PROMPTS]
    assert got["one"] != base
    with pytest.raises(AdapterError, match="all 2 adapter slots"):
        engine.load_adapter("three", folders[2])
    with pytest.raises(AdapterError, match="loaded already"):
        engine.load_adapter("one", folders[2])
    engine.unload_adapter("two")
    with pytest.raises(AdapterError, match="no adapter named 'two'"):
        engine.generate(PROMPTS, GREEDY, adapter="two")
    # New weights under the same name: nothing of the old ones may come from the cache.
    engine.load_adapter("one", folders[2], replace=True)
    again = [a[0].token_ids for a in engine.generate(PROMPTS, GREEDY, adapter="one")]
    assert again == [_want(folders[2], p) for p in PROMPTS]
    assert [a[0].token_ids for a in engine.generate(PROMPTS, GREEDY)] == base
    engine.unload_adapter("one")
    engine.check_invariants()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, "rank 8"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
        ({"bias": "all"}, "biases"),
    ],
)
def test_what_does_not_fit_a_slot_is_refused(
    engine: Engine, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        engine.load_adapter("x", _adapter(tmp_path / "x", 0, **changes))
    assert engine.adapters.names == ()


def test_every_mixture_of_adapters_adds_what_each_token_asks_for() -> None:
    """In float64: prompts and rows that decode use no adapter, one beside the base, or several."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(1, 3, 2, 8)), rng.normal(size=(1, 3, 2, 5))
    x = rng.normal(size=(1, 12, 8))
    target = LoraTarget(key="w", names=("w",), num_inputs=8, num_outputs=5)
    node: Any = object()
    mixtures = [[0, 0, 0, 0], [2, 2, 2, 2], [0, 3, 3, 0], [1, 2, 0, 3]]

    @jax.jit
    def run(slots: jax.Array, a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        stacks = LoraStacks(
            targets={node: target}, stacks={"w": (a, b)}, slots_T=slots, num_decode=4
        )
        return stacks.added(node, x, jax.numpy.zeros((1, 12, 5)), None)

    for decode in mixtures:
        for prompts in mixtures:
            slots = np.array([*decode, *prompts, *prompts])
            got = run(slots, *(v.astype(np.float32) for v in (a, b, x)))
            want = [
                x[0, t] @ a[0, s - 1].T @ b[0, s - 1] if s else np.zeros(5)
                for t, s in enumerate(slots)
            ]
            np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
