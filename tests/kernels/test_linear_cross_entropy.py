"""The chunked LM-head loss against PyTorch in float64: sums, gradients, transformations."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels import linear_cross_entropy

T, D, V = 23, 6, 31


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def softcap(logits: jax.Array) -> jax.Array:
    return 2.0 * jnp.tanh(logits / 2.0)


def inputs(supervised: float = 0.5) -> list[np.ndarray]:
    """hidden, weight, bias, labels, weights of tokens."""
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(T) < supervised, rng.integers(0, V, T), -100)
    arrays = [rng.normal(size=shape) for shape in ((T, D), (V, D), (V,))]
    return [*arrays, labels, rng.random(T) * (rng.random(T) > 0.2)]


@pytest.mark.parametrize("supervised", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 4, 23, 40])
def test_sums_and_gradients_are_pytorchs(x64: None, supervised: float, chunk: int) -> None:
    hidden, weight, bias, labels, weights = inputs(supervised)
    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, weight, bias)]
    logits = 2.0 * torch.tanh((leaves[0] @ leaves[1].T + leaves[2]) / 2.0)
    target = torch.tensor(labels)
    losses = torch.nn.functional.cross_entropy(
        logits, target, reduction="none", label_smoothing=0.1
    )
    want = (losses * torch.tensor(weights)).sum()
    want.backward()

    @jax.jit
    def run(hidden: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
        def loss(*args: jax.Array) -> Any:
            result = linear_cross_entropy(
                args[0],
                args[1],
                jnp.asarray(labels),
                bias=args[2],
                tail=softcap,
                weights_T=jnp.asarray(weights),
                label_smoothing=0.1,
                chunk=chunk,
            )
            return result.loss_sum, result

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, weight, bias)

    (loss_sum, result), grads = run(*(jnp.asarray(x) for x in (hidden, weight, bias)))
    np.testing.assert_allclose(loss_sum, want.detach(), rtol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(grad, leaf.grad, atol=1e-12)
    counted = (labels != -100) & (weights > 0)
    np.testing.assert_allclose(result.weight_sum, weights[labels != -100].sum())
    assert result.correct == (logits.argmax(-1) == target).numpy()[counted].sum()


def test_without_options_it_is_log_softmax(x64: None) -> None:
    hidden, weight, _, labels, _ = (jnp.asarray(x) for x in inputs(1.0))
    logp = jax.nn.log_softmax(hidden @ weight.T)
    result = linear_cross_entropy(hidden, weight, labels)
    np.testing.assert_allclose(result.loss_sum, -logp[jnp.arange(T), labels].sum(), rtol=1e-13)
    assert result.correct == (logp.argmax(-1) == labels).sum()


def test_zero_logits_are_not_all_right() -> None:
    labels = jnp.arange(4)
    result = linear_cross_entropy(jnp.ones((4, D)), jnp.zeros((V, D)), labels)
    assert result.correct == 1  # the first of equals, as argmax has it


def mean_loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
    result = linear_cross_entropy(hidden, weight, labels, chunk=4, **options)
    return result.loss_sum / result.weight_sum


def over_micro_batches(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        body = lambda total, xs: (total + loss(xs[0], weight, xs[1]), None)  # noqa: E731
        stacked = jnp.stack([hidden, 2 * hidden]), jnp.stack([labels, labels])
        return jax.lax.scan(body, jnp.zeros((), hidden.dtype), stacked)[0]

    return run


def test_scan_checkpoint_and_jit_give_the_plain_gradient(x64: None) -> None:
    hidden, weight, _, labels, _ = (jnp.asarray(x) for x in inputs())

    def plain(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        logp, keep = jax.nn.log_softmax(hidden @ weight.T), labels != -100
        picked = logp[jnp.arange(T), jnp.where(keep, labels, 0)]
        return -jnp.where(keep, picked, 0.0).sum() / keep.sum()

    fused = jax.jit(jax.grad(over_micro_batches(jax.checkpoint(mean_loss)), (0, 1)))
    want = jax.grad(over_micro_batches(plain), (0, 1))(hidden, weight, labels)
    for got, expected in zip(fused(hidden, weight, labels), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-13)


def test_a_frozen_head_gives_the_same_gradient_of_hidden_and_none_of_its_own() -> None:
    hidden, weight, _, labels, _ = (jnp.asarray(x) for x in inputs())

    def grads(weight_grad: bool) -> Any:
        return jax.grad(mean_loss, (0, 1))(hidden, weight, labels, weight_grad=weight_grad)

    (dhidden, dweight), (frozen_dhidden, frozen_dweight) = grads(True), grads(False)
    np.testing.assert_allclose(frozen_dhidden, dhidden, rtol=1e-6)
    assert (frozen_dweight == 0).all() and (dweight != 0).any()


def test_bfloat16_accumulates_in_float32() -> None:
    hidden, weight, _, labels, _ = inputs()
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in low]
    value, grads = jax.value_and_grad(mean_loss, (0, 1))(*low, jnp.asarray(labels))
    want, want_grads = jax.value_and_grad(mean_loss, (0, 1))(*wide, jnp.asarray(labels))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for grad, expected in zip(grads, want_grads, strict=True):
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_allclose(grad.astype(jnp.float32), expected, atol=4e-3)


def test_logits_of_all_tokens_never_exist() -> None:
    hidden, weight = jnp.zeros((2048, 8)), jnp.zeros((4096, 8))

    def loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, chunk=128).loss_sum

    step = jax.jit(jax.grad(loss))
    analysis = step.lower(hidden, weight, jnp.zeros(2048, jnp.int32)).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2048 * 4096 * 4 / 2


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        linear_cross_entropy(
            jnp.zeros((3, 4)), jnp.zeros((5, 4), jnp.bfloat16), jnp.zeros(2, jnp.int32), chunk=0
        )
    for part in ("float32, weight bfloat16", "labels int32 (2,)", "chunk=0"):
        assert part in str(error.value)
