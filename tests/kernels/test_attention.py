"""Every form of attention against PyTorch in float64: values and gradients, every mask kind."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.masking_utils import (
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
)

from headrace.errors import ConfigError
from headrace.kernels import attention
from headrace.kernels.attention_chunked import chunked_attention
from headrace.kernels.attention_dense import dense_attention
from headrace.kernels.attention_gpu import cudnn_attention
from headrace.kernels.masks import MaskArrays, MaskRule, visible_BNTS

# The cases are many and tiny: what they wait for is the compiler.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture
def x64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def inputs(
    B: int = 2, N: int = 4, K: int = 2, T: int = 37, S: int = 37, H: int = 8, Hv: int = 8
) -> list[np.ndarray]:
    """q, k, v, gradient of the output, sinks; float64."""
    rng = np.random.default_rng(0)
    shapes = [(B, N, T, H), (B, K, S, H), (B, K, S, Hv), (B, N, T, Hv), (N,)]
    return [rng.normal(size=shape) for shape in shapes]


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    keep: np.ndarray | None,
    bias: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """As Transformers' eager attention writes it, with zeros for rows that see nothing."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~torch.tensor(keep), -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    seen = torch.isfinite(scores).any(-1, keepdim=True)
    probs = torch.softmax(torch.where(seen, scores, torch.zeros_like(scores)), -1) * seen
    if sinks is not None:
        probs = probs[..., :-1]
    return probs @ v.repeat_interleave(groups, 1)


def compare(
    form: Callable[..., jax.Array],
    arrays: list[np.ndarray],
    *,
    rule: MaskRule,
    masks: MaskArrays = MaskArrays(),  # noqa: B008
    softcap: float | None = None,
    with_sinks: bool = False,
    tolerance: float = 1e-11,
    **options: Any,
) -> None:
    q, k, v, dout, sinks = arrays
    given = [q, k, v, sinks] if with_sinks else [q, k, v]
    leaves = [torch.tensor(x, requires_grad=True) for x in given]
    keep = visible_BNTS(rule, masks, q.shape[2], k.shape[2])
    keep_BNTS = None if keep is None else np.asarray(keep)
    sinks_leaf = leaves[3] if with_sinks else None
    want = eager(*leaves[:3], sinks_leaf, keep_BNTS, scale=0.3, softcap=softcap)
    want.backward(torch.tensor(dout))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(*given: jax.Array) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
            more = {"sinks_N": sinks[0]} if sinks else {}
            if softcap is not None:
                more["softcap"] = softcap
            return form(q, k, v, scale=0.3, rule=rule, arrays=masks, **more, **options)

        out, pull_back = jax.vjp(call, *given)
        return out, pull_back(jnp.asarray(dout, out.dtype))

    out, grads = run(*(jnp.asarray(x) for x in given))
    np.testing.assert_allclose(out, want.detach(), atol=tolerance, rtol=tolerance)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(grad, leaf.grad, atol=tolerance, rtol=tolerance)


FORMS = {
    "dense": (dense_attention, {}),
    "unrolled": (chunked_attention, {"unroll": True, "block_q": 16}),
    "looped": (chunked_attention, {"unroll": False, "block_q": 16, "block_k": 8}),
}
CAUSAL, FULL = MaskRule(causal=True), MaskRule(causal=False)


def padding(B: int, S: int) -> jax.Array:
    """Left padding in the first row (causal rows that see nothing), a random mask below."""
    mask = np.random.default_rng(1).random((B, S)) > 0.4
    mask[0, : S // 2], mask[0, S // 2 :] = False, True
    return jnp.asarray(mask)


def segments(B: int, T: int) -> jax.Array:
    return jnp.asarray(np.sort(np.random.default_rng(2).integers(0, 4, (B, T)), axis=1))


def arbitrary(*shape: int) -> jax.Array:
    mask = np.random.default_rng(3).random(shape) > 0.3
    mask[..., 5 % shape[-2], :] = False
    return jnp.asarray(mask)


CASES: dict[str, dict[str, Any]] = {
    "full": {"rule": FULL},
    "causal": {"rule": CAUSAL},
    "window": {"rule": MaskRule(causal=True, window=9)},
    "window of one": {"rule": MaskRule(causal=True, window=1)},
    "two-sided window": {"rule": MaskRule(causal=False, window=5)},
    "padding": {"rule": FULL, "masks": MaskArrays(padding(2, 37))},
    "causal, left padding": {"rule": CAUSAL, "masks": MaskArrays(padding(2, 37))},
    "segments": {"rule": CAUSAL, "masks": MaskArrays(None, segments(2, 37))},
    "all keys hidden": {"rule": FULL, "masks": MaskArrays(jnp.zeros((2, 37), bool))},
    "mask by head": {"rule": FULL, "masks": MaskArrays(None, None, arbitrary(1, 4, 37, 37))},
    "mask by row": {"rule": CAUSAL, "masks": MaskArrays(None, None, arbitrary(2, 1, 37, 37))},
    "softcap": {"rule": CAUSAL, "softcap": 2.0, "masks": MaskArrays(padding(2, 37))},
    "sinks": {"rule": MaskRule(causal=True, window=9), "with_sinks": True},
    "sinks, left padding": {
        "rule": CAUSAL,
        "with_sinks": True,
        "masks": MaskArrays(padding(2, 37)),
    },
    "other head size of v": {"rule": CAUSAL, "shape": {"Hv": 5}},
    "more keys": {"rule": FULL, "shape": {"S": 53}},
    "more keys, causal": {"rule": CAUSAL, "shape": {"S": 53}},
    "more queries, window": {"rule": MaskRule(causal=True, window=3), "shape": {"S": 11}},
    "one key head": {"rule": CAUSAL, "shape": {"K": 1}},
    "no groups": {"rule": CAUSAL, "shape": {"K": 4}},
    "whole blocks": {"rule": CAUSAL, "shape": {"T": 32, "S": 32}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_pytorchs(x64: None, form: str, case: str) -> None:
    settings = dict(CASES[case])
    function, options = FORMS[form]
    compare(function, inputs(**settings.pop("shape", {})), **settings, **options)


def test_sdpa_of_torch_agrees_through_the_door(x64: None) -> None:
    q, k, v, *_ = inputs(T=80, S=80)
    tensors = [torch.tensor(x) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        *tensors, is_causal=True, scale=0.3, enable_gqa=True
    )
    got = attention(*(jnp.asarray(x) for x in (q, k, v)), scale=0.3, causal=True)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("window", [1, 4, 30])
def test_windows_are_those_of_transformers(window: int) -> None:
    i, j = torch.arange(20)[:, None], torch.arange(20)[None, :]
    causal = sliding_window_causal_mask_function(window)(0, 0, i, j)
    both = sliding_window_bidirectional_overlay(window)(0, 0, i, j)
    assert (MaskRule(causal=True, window=window).numpy(20, 20) == causal.numpy()).all()
    assert (MaskRule(causal=False, window=window).numpy(20, 20) == both.numpy()).all()


def test_an_additive_mask_is_added_and_differentiated(x64: None) -> None:
    q, k, v, dout, _ = inputs()
    bias = np.random.default_rng(4).normal(size=(1, 4, 37, 37))
    bias[:, :, 7] = torch.finfo(torch.float64).min  # uniform, as in eager PyTorch
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v, bias)]
    eager(*leaves[:3], None, None, leaves[3], scale=0.3, softcap=None).backward(torch.tensor(dout))

    def call(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return attention(q, k, v, scale=0.3, causal=False, mask=bias)

    _, pull_back = jax.vjp(call, *(jnp.asarray(x) for x in (q, k, v, bias)))
    for grad, leaf in zip(pull_back(jnp.asarray(dout)), leaves, strict=True):
        np.testing.assert_allclose(grad, leaf.grad, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_stays_within_its_rounding(form: str) -> None:
    function, options = FORMS[form]
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs()[:3]]
    want = dense_attention(*(x.astype(jnp.float32) for x in low), scale=0.3, rule=CAUSAL)
    got = function(*low, scale=0.3, rule=CAUSAL, **options)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


def test_dropout_keeps_the_mean_and_follows_the_key() -> None:
    q, k, _, *_ = (jnp.asarray(x, jnp.float32) for x in inputs(B=8, T=64, S=64))
    ones = jnp.ones((8, 2, 64, 3))

    def call(seed: int) -> jax.Array:
        key = jax.random.key(seed)
        return attention(q, k, ones, scale=0.3, causal=False, dropout=0.25, key=key)

    assert (call(0) == call(0)).all() and (call(0) != call(1)).any()
    np.testing.assert_allclose(call(0).mean(), 1.0, atol=0.01)
    # The sum of the kept probabilities has the variance p / (1 - p) * sum(probs^2).
    assert 0.01 < float(call(0)[..., 0].std()) < 0.2


@pytest.mark.parametrize(
    ("rule", "masks"),
    [
        (CAUSAL, MaskArrays()),
        (MaskRule(causal=True, window=9), MaskArrays()),
        (CAUSAL, MaskArrays(padding(2, 36))),
        (MaskRule(causal=True, window=9), MaskArrays(padding(2, 36), segments(2, 36))),
        (FULL, MaskArrays(padding(2, 36), None, arbitrary(1, 1, 36, 36))),
    ],
)
def test_what_is_asked_of_cudnn_means_the_same(rule: MaskRule, masks: MaskArrays) -> None:
    """jax.nn's XLA form stands in for cuDNN: the translation of masks is what is tested."""
    with jax.enable_x64(False):
        arrays = [x.astype(np.float32) for x in inputs(T=36, S=36)]
        compare(cudnn_attention, arrays, rule=rule, masks=masks, backend="xla", tolerance=2e-5)


def test_chunked_memory_is_linear_in_the_sequence() -> None:
    def scratch(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.float32)

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(q, k, v, scale=0.3, causal=True).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert scratch(16384) < 2.5 * scratch(8192)


def test_all_problems_of_a_request_are_told_at_once() -> None:
    q, k = jnp.zeros((2, 3, 8, 4)), jnp.zeros((2, 2, 8, 4))
    with pytest.raises(ConfigError) as error:
        attention(q, k, k, scale=1.0, causal=True, window=0, padding_mask=jnp.ones((2, 8)))
    for part in ("3 query heads, 2 key/value heads", "window=0", "padding_mask float32"):
        assert part in str(error.value)


def test_a_named_form_that_cannot_is_refused_and_none_chooses_another() -> None:
    q = jnp.zeros((1, 2, 8, 4))
    bias = jnp.zeros((1, 1, 8, 8))
    with pytest.raises(ConfigError, match="additive mask"):
        attention(q, q, q, scale=1.0, causal=False, mask=bias, implementation="chunked")
    with pytest.raises(ConfigError, match="additive mask"):
        attention(q, q, q, scale=1.0, causal=False, mask=bias, implementation="splash")
    with pytest.raises(ConfigError, match="takes bfloat16"):
        attention(q, q, q, scale=1.0, causal=False, mask=bias, implementation="cudnn")
    with pytest.raises(ConfigError, match="PRNG key"):
        attention(q, q, q, scale=1.0, causal=False, dropout=0.1)
    assert attention(q, q, q, scale=1.0, causal=False, mask=bias).shape == q.shape
