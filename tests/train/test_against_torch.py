"""Captured Llama and BERT trained by our step, against the same models in torch eager."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from headrace.bridge import JaxModule, to_jax
from headrace.train.lora import apply_lora
from headrace.train.losses import ClassificationLoss, causal_loss
from headrace.train.optimizers import decay_keys, decay_parameter_names, make_optimizer
from headrace.train.state import TrainState, compute_dtypes, create_state
from headrace.train.step import make_train_step

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
RATES = [3e-3 / (1 + step) for step in range(12)]
CLIP, DECAY = 0.02, 0.1
CAUSAL, CLASSES = ("input_ids", "position_ids"), ("input_ids", "attention_mask")
Seen = list[tuple[float, float]]


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=67, max_position_embeddings=64,
        )
    ).train()  # fmt: skip


LORA: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "mixed": {
        "target_modules": ["o_proj", "down_proj"], "use_rslora": True,
        "modules_to_save": ["lm_head"], "layers_to_transform": [0, 2],
    },
}  # fmt: skip


def lora_llama(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **LORA[kind])
    model, _ = apply_lora(tiny_llama().to(dtype), config)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero as initialised: A would have no gradient in the first step
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def tiny_bert(kind: str) -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=67, max_position_embeddings=64, num_labels=KINDS[kind][0],
            problem_type=kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).train()  # fmt: skip


KINDS = {
    "single_label_classification": (5, lambda r, n: r.integers(0, 5, n, dtype=np.int32)),
    "multi_label_classification": (3, lambda r, n: r.integers(0, 2, (n, 3)).astype(np.float32)),
    "regression": (1, lambda r, n: r.normal(size=n).astype(np.float32)),
}


def causal_batches(steps: int, rows: int = 4, length: int = 16) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(steps):
        ids = rng.integers(0, 67, (rows, length), dtype=np.int32)
        labels = np.where(rng.random((rows, length)) < 0.6, ids, -100).astype(np.int32)
        labels[:, 0] = -100
        made.append(
            {
                "input_ids": ids, "labels": labels,
                "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
                "segment_ids": np.ones((rows, length), np.int32),
            }
        )  # fmt: skip
    return made


def class_batches(steps: int, kind: str, rows: int = 4) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(steps):
        mask = (np.arange(12) < rng.integers(3, 13, (rows, 1))).astype(np.int32)
        made.append(
            {
                "input_ids": rng.integers(0, 67, (rows, 12), dtype=np.int32),
                "attention_mask": mask, "labels": KINDS[kind][1](rng, rows),
                "weights": np.ones(rows, np.float32),
            }
        )  # fmt: skip
    return made


def example(batch: dict[str, np.ndarray], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(batch[n]).long() for n in names if n in batch}


@cache
def captured(kind: str, dtype: torch.dtype = torch.float32) -> JaxModule:
    """Captures are shared: they never change, training state lives outside."""
    if kind in KINDS:
        return to_jax(tiny_bert(kind), example(class_batches(1, kind)[0], CLASSES))
    model = tiny_llama() if kind == "full" else lora_llama(kind, dtype)
    return to_jax(model, example(causal_batches(1)[0], CAUSAL))


def torch_run(model: Any, batches: list[dict[str, np.ndarray]], inputs: tuple[str, ...]) -> Seen:
    """What transformers' Trainer does in a step, written out: loss, clip, AdamW in two groups."""
    decayed = decay_parameter_names(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n in decayed], "weight_decay": DECAY},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]
    )
    seen = []
    for rate, batch in zip(RATES, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        labels = torch.from_numpy(batch["labels"])
        labels = labels if labels.is_floating_point() else labels.long()
        loss = model(**example(batch, inputs), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], CLIP)
        optimizer.step()
        seen.append((loss.item(), float(norm)))
    return seen


def our_run(
    module: JaxModule, loss: Any, batches: list[dict[str, np.ndarray]], *, count: int = 1
) -> tuple[Seen, TrainState]:
    layout = module.layout
    params = module.params()
    decay = decay_keys(
        layout.trainable, layout_keys=layout.keys, decay_names=decay_parameter_names(module.module)
    )
    optimizer = make_optimizer("adamw", decay=decay, weight_decay=DECAY)
    state, frozen = create_state(
        params, module.buffers(), trainable=layout.trainable, optimizer=optimizer, seed=0
    )
    dtypes = compute_dtypes(params, layout.trainable)
    step = jax.jit(make_train_step(loss, optimizer, dtypes=dtypes, max_grad_norm=CLIP))
    seen = []
    for rate, batch in zip(RATES, batches, strict=False):
        split = {n: v.reshape(count, len(v) // count, *v.shape[1:]) for n, v in batch.items()}
        state, metrics = step(state, frozen, split, jnp.float32(rate))
        assert bool(metrics["finite"])
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return seen, state


def assert_equal_runs(
    ours: tuple[Seen, TrainState], theirs: Seen, module: JaxModule, model: Any
) -> None:
    seen, state = ours
    np.testing.assert_allclose([o[0] for o in seen], [t[0] for t in theirs], rtol=1e-5)
    np.testing.assert_allclose([o[1] for o in seen], [t[1] for t in theirs], rtol=1e-4)
    assert any(t[1] > CLIP for t in theirs), "the clip never acted"
    named = dict(model.named_parameters())
    for name, value in module.layout.unstack(state.trainable).items():
        np.testing.assert_allclose(
            np.asarray(value), named[name].detach().numpy(), atol=3e-5, err_msg=name
        )


@pytest.mark.parametrize(("fused", "count"), [(False, 1), (True, 4)])
def test_full_llama(fused: bool, count: int) -> None:
    batches = causal_batches(len(RATES))
    module = captured("full")
    loss = causal_loss(module, trainable=module.layout.trainable, fused=fused)
    assert (loss.head is not None) == fused
    model = tiny_llama()
    theirs = torch_run(model, batches, CAUSAL)
    assert_equal_runs(our_run(module, loss, batches, count=count), theirs, module, model)


@pytest.mark.parametrize("kind", LORA)
def test_lora_llama(kind: str) -> None:
    batches = causal_batches(6)
    module = captured(kind)
    model = lora_llama(kind)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for k in module.layout.trainable for n in module.layout.keys[k]} == trained
    loss = causal_loss(module, trainable=module.layout.trainable)
    theirs = torch_run(model, batches, CAUSAL)
    assert_equal_runs(our_run(module, loss, batches), theirs, module, model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_first_gradients_equal_eager_peft(kind: str) -> None:
    batch = causal_batches(1)[0]
    module = captured(kind)
    params = module.params()
    keys = module.layout.trainable
    loss = causal_loss(module, trainable=keys)

    def mean(trainable: Any) -> Any:
        sums = loss({**params, **trainable}, module.buffers(), batch, rng=None, train=True)
        return sums.loss / sums.weight

    grads = module.layout.unstack(jax.jit(jax.grad(mean))({k: params[k] for k in keys}))
    model = lora_llama(kind)
    model(**example(batch, (*CAUSAL, "labels"))).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            theirs = parameter.grad.numpy()
            assert np.abs(theirs).max() > 0, name
            difference = np.abs(np.asarray(grads[name]) - theirs).max()
            assert difference <= 1e-5 * np.abs(theirs).max() + 1e-8, (name, difference)


@pytest.mark.parametrize("kind", KINDS)
def test_bert(kind: str) -> None:
    batches = class_batches(6, kind)
    module = captured(kind)
    loss: Any = ClassificationLoss(module=module, problem_type=kind)
    model = tiny_bert(kind)
    theirs = torch_run(model, batches, CLASSES)
    assert_equal_runs(our_run(module, loss, batches), theirs, module, model)


def test_filler_rows_change_nothing() -> None:
    kind = "single_label_classification"
    batch = class_batches(1, kind)[0]
    module = captured(kind)
    loss = ClassificationLoss(module=module, problem_type=kind)
    padded = {n: np.concatenate([v, np.zeros_like(v)]) for n, v in batch.items()}
    padded["attention_mask"][4:, 0] = 1
    (plain,), _ = our_run(module, loss, [batch])
    (filled,), _ = our_run(module, loss, [padded], count=2)
    np.testing.assert_allclose(filled, plain, rtol=1e-6)


def test_packed_rows_equal_separate_rows() -> None:
    """Two examples in one row, by segment and position ids, are two rows: same loss, gradients."""
    two = causal_batches(1, rows=2, length=8)[0]
    packed = {n: v.reshape(1, 16) for n, v in two.items()}
    packed["segment_ids"] = np.repeat([[1, 2]], 8, axis=1).astype(np.int32)
    module = captured("full")
    loss = causal_loss(module, trainable=module.layout.trainable)
    (separate,), state = our_run(module, loss, [two])
    (together,), packed_state = our_run(module, loss, [packed])
    np.testing.assert_allclose(together, separate, rtol=1e-5)
    for key, value in state.trainable.items():
        np.testing.assert_allclose(
            np.asarray(packed_state.trainable[key]), np.asarray(value), atol=2e-5, err_msg=key
        )


def test_bf16_run_follows_float32() -> None:
    batches = causal_batches(1) * 12
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        module = captured("lora", dtype)
        assert {str(v.dtype) for v in module.params().values()} == {str(dtype).split(".")[-1]}
        loss = causal_loss(module, trainable=module.layout.trainable)
        seen, state = our_run(module, loss, batches)
        losses[dtype] = [s[0] for s in seen]
        assert {v.dtype for v in state.trainable.values()} == {jnp.dtype("float32")}
    full, half = losses[torch.float32], losses[torch.bfloat16]
    assert full[-1] < full[0] - 0.02 and half[-1] < half[0] - 0.02
    np.testing.assert_allclose(half, full, rtol=5e-3)
