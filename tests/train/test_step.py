"""The step against torch eager, accumulation, guards, and compile events."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twin import JaxTwin, TorchTwin, batches, jax_params, micro

from headrace.errors import AdapterError
from headrace.train.losses import causal_loss, shift_labels
from headrace.train.optimizers import make_optimizer
from headrace.train.shapes import CompiledFunction
from headrace.train.state import TrainState, compute_dtypes, create_state
from headrace.train.step import (
    make_eval_step,
    make_gradient_step,
    make_train_step,
    make_update_step,
)

RATES = [0.02 / (step + 1) for step in range(20)]
DECAY = frozenset({"embed.weight", "hidden.weight", "head.weight"})
ALL = frozenset({"embed.weight", "hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight"})  # fmt: skip  # noqa: E501


def setup(
    *, dropout: float = 0.0, max_grad_norm: float = 0.3, trainable: frozenset[str] = ALL,
    buffers: dict[str, Any] | None = None,
) -> tuple[Any, Any, TrainState, dict[str, jax.Array], CompiledFunction]:  # fmt: skip
    params = jax_params(TorchTwin())
    optimizer = make_optimizer("adamw", decay=DECAY, weight_decay=0.1)
    state, frozen = create_state(
        params, buffers or {}, trainable=trainable, optimizer=optimizer, seed=3
    )
    loss = causal_loss(JaxTwin(dropout), trainable=trainable)
    step = make_train_step(
        loss, optimizer, dtypes=compute_dtypes(params, trainable), max_grad_norm=max_grad_norm
    )
    compiled = CompiledFunction(function=step, name="train_step", batch_position=2, donate=(0,))
    return loss, optimizer, state, frozen, compiled


def run(
    steps: list[dict[str, np.ndarray]], *, count: int, **kwargs: Any
) -> tuple[list[dict[str, float]], TrainState]:
    _, _, state, frozen, step = setup(**kwargs)
    seen = []
    for rate, batch in zip(RATES, steps, strict=False):
        state, metrics = step(state, frozen, micro(batch, count), np.float32(rate))
        seen.append({name: float(v) for name, v in metrics.items() if v.ndim == 0})
    return seen, state


def torch_run(steps: list[dict[str, np.ndarray]]) -> tuple[list[tuple[float, float]], Any]:
    model = TorchTwin()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n in DECAY], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if n not in DECAY], "weight_decay": 0.0},
        ]
    )
    seen = []
    for rate, batch in zip(RATES, steps, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels, segments = (
            torch.tensor(batch[n]).long() for n in ("input_ids", "labels", "segment_ids")
        )
        targets = labels[:, 1:].masked_fill(segments[:, 1:] != segments[:, :-1], -100)
        logits = model(ids)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))  # fmt: skip  # noqa: E501
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen, model


def test_twenty_steps_equal_torch() -> None:
    steps = batches(20)
    theirs, model = torch_run(steps)
    ours, state = run(steps, count=1)
    np.testing.assert_allclose([m["loss"] for m in ours], [t[0] for t in theirs], rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in ours], [t[1] for t in theirs], rtol=1e-5)
    assert any(t[1] > 0.3 for t in theirs), "the clip never acted"
    for name, value in model.named_parameters():
        np.testing.assert_allclose(
            np.asarray(state.trainable[name]), value.detach().numpy(), atol=2e-5, err_msg=name
        )


@pytest.mark.parametrize("count", [2, 4, 8])
def test_accumulation_is_the_same_step(count: int) -> None:
    steps = batches(6)
    whole, state_1 = run(steps, count=1)
    split, state_n = run(steps, count=count)
    for name in ("loss", "grad_norm", "num_tokens", "num_supervised", "accuracy"):
        np.testing.assert_allclose(
            [m[name] for m in split], [m[name] for m in whole], rtol=1e-6, err_msg=name
        )
    for name, value in state_1.trainable.items():
        np.testing.assert_allclose(
            np.asarray(state_n.trainable[name]), np.asarray(value), atol=2e-6
        )


def test_two_programs_equal_one() -> None:
    steps = batches(4)
    one, state_one = run(steps, count=4, dropout=0.3)
    loss, optimizer, state, frozen, _ = setup(dropout=0.3)
    dtypes = dict.fromkeys(ALL, jnp.float32)
    gradient = jax.jit(make_gradient_step(loss, dtypes=dtypes))
    update = jax.jit(make_update_step(optimizer, max_grad_norm=0.3))
    for rate, batch, expected in zip(RATES, steps, one, strict=False):
        sums, buffers = None, state.buffers
        for index in range(4):
            part = {name: value[index] for name, value in micro(batch, 4).items()}
            sums, buffers = gradient(state, frozen, buffers, part, index, sums)
        state, metrics = update(state, sums, buffers, jnp.float32(rate))
        assert float(metrics["loss"]) == pytest.approx(expected["loss"], rel=1e-6)
    for name, value in state_one.trainable.items():
        np.testing.assert_allclose(np.asarray(state.trainable[name]), np.asarray(value), atol=2e-6)


def test_counts_and_shift() -> None:
    labels = jnp.array([[5, 6, 7, 8, 9, -100]])
    segments = jnp.array([[1, 1, 2, 2, 2, 0]])
    assert shift_labels(labels, None).tolist() == [[6, 7, 8, 9, -100, -100]]
    assert shift_labels(labels, segments).tolist() == [[6, -100, 8, 9, -100, -100]]
    batch = batches(1)[0]
    seen, _ = run([batch], count=2)
    assert seen[0]["num_tokens"] == (batch["segment_ids"] > 0).sum()
    targets = np.where(batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1], batch["labels"][:, 1:], -100)  # fmt: skip  # noqa: E501
    assert seen[0]["num_supervised"] == (targets != -100).sum()


def test_only_trainable_moves_and_frozen_is_not_copied() -> None:
    chosen = frozenset({"hidden.weight", "hidden.bias"})
    _, _, state, frozen, step = setup(trainable=chosen)
    before = {n: np.asarray(v) for n, v in state.trainable.items()}
    kept = {n: v.unsafe_buffer_pointer() for n, v in frozen.items()}
    for batch in batches(2):
        state, _ = step(state, frozen, micro(batch, 1), np.float32(0.01))
    assert set(state.trainable) == chosen and set(frozen) == ALL - chosen
    assert all(np.abs(np.asarray(state.trainable[n]) - before[n]).max() > 1e-3 for n in chosen)
    assert {n: v.unsafe_buffer_pointer() for n, v in frozen.items()} == kept


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(AdapterError, match="0 of 6 parameters are trainable"):
        setup(trainable=frozenset())


def test_bad_step_changes_nothing_but_the_counter() -> None:
    buffers = {"seen": jnp.zeros(())}
    _, _, state, frozen, step = setup(buffers=buffers)
    good = batches(1)[0]
    state, _ = step(state, frozen, micro(good, 2), np.float32(0.01))
    assert float(state.buffers["seen"]) == 2
    kept = jax.tree.map(np.asarray, (state.trainable, state.opt_state, state.buffers))
    masked = {**good, "labels": np.full_like(good["labels"], -100)}
    state, metrics = step(state, frozen, micro(masked, 2), np.float32(0.01))
    assert not bool(metrics["finite"]) and np.isnan(metrics["loss"])
    assert float(metrics["num_supervised"]) == 0
    after = jax.tree.map(np.asarray, (state.trainable, state.opt_state, state.buffers))
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, after))
    assert int(state.step) == 2
    poisoned = {n: v.at[0].set(jnp.inf) if n == "head.weight" else v for n, v in state.trainable.items()}  # fmt: skip  # noqa: E501
    bad = TrainState(step=state.step, rng=state.rng, trainable=poisoned, opt_state=state.opt_state, buffers=state.buffers)  # fmt: skip  # noqa: E501
    _, metrics = step(bad, frozen, micro(good, 2), np.float32(0.01))
    assert not bool(metrics["finite"])


def test_dropout_depends_on_step_and_micro_batch() -> None:
    batch = batches(1)[0]
    same = {name: np.concatenate([value[:4], value[:4]]) for name, value in batch.items()}
    _, _, state, frozen, step = setup(dropout=0.5)
    losses = []
    for _ in range(3):
        state, metrics = step(state, frozen, micro(same, 2), np.float32(0.0))
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3, "the same mask in every step"
    again = [m["loss"] for m in run([same], count=2, dropout=0.5)[0]]
    assert again[0] == losses[0], "the same seed gives the same masks"
    loss, _, state, frozen, _ = setup(dropout=0.5)
    half = {name: value[:4] for name, value in same.items()}
    key = jax.random.fold_in(state.rng, 0)
    parts = [
        loss({**state.trainable, **frozen}, {}, half, rng=jax.random.fold_in(key, i), train=True)
        for i in range(2)
    ]
    assert float(parts[0].loss) != float(parts[1].loss)
    mean = sum(float(p.loss) for p in parts) / sum(float(p.weight) for p in parts)
    assert mean == pytest.approx(losses[0], rel=1e-6)


def test_bf16_compute_keeps_float32_masters() -> None:
    params = {n: v.astype(jnp.bfloat16) for n, v in jax_params(TorchTwin()).items()}
    optimizer = make_optimizer("adamw")
    state, frozen = create_state(params, {}, trainable=ALL, optimizer=optimizer, seed=0)
    loss = causal_loss(JaxTwin(), trainable=ALL)
    step = jax.jit(make_train_step(loss, optimizer, dtypes=compute_dtypes(params, ALL)))
    assert {v.dtype for v in state.trainable.values()} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(make_train_step(loss, optimizer, dtypes=compute_dtypes(params, ALL)))(
        state, frozen, micro(batches(1)[0], 1), jnp.float32(0.1)))  # fmt: skip
    assert "bf16" in text
    batch = micro(batches(1)[0], 1)
    losses = []
    for _ in range(15):
        state, metrics = step(state, frozen, batch, jnp.float32(1e-4))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0], "updates of 1e-4 are lost when the master is bf16"
    assert {v.dtype for v in state.trainable.values()} == {jnp.dtype("float32")}


def test_eval_step_sums() -> None:
    loss, _, state, frozen, _step = setup(dropout=0.5, trainable=frozenset({"head.weight"}))
    eval_step = jax.jit(make_eval_step(loss, dtypes={"head.weight": jnp.float32}))
    batch = batches(1)[0]
    sums = eval_step(state.trainable, frozen, state.buffers, batch)
    clean, _ = run([batch], count=1)
    assert float(sums["loss_sum"] / sums["weight"]) == pytest.approx(clean[0]["loss"], rel=1e-6)
    assert float(sums["correct"] / sums["weight"]) == pytest.approx(clean[0]["accuracy"])


def test_new_shape_is_an_event_with_its_cause() -> None:
    _, _, state, frozen, step = setup()
    step.expected_shapes = 1
    heard = []
    step.on_compile = heard.append
    for length in (6, 6, 9):
        batch = batches(1, length=length)[0]
        state, _ = step(state, frozen, micro(batch, 2), np.float32(0.01))
    assert [event.expected for event in heard] == [True, False]
    assert heard[0].cause == ()
    assert "input_ids [2, 4, 6] int32 -> [2, 4, 9] int32" in heard[1].cause
    assert "unplanned" in str(heard[1]) and step.compile_seconds > 0
    assert heard[0].memory is not None and heard[0].memory.peak > 0
    assert heard[0].memory.aliased > 0, "the state is not donated"
