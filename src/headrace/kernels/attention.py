"""The door to attention: checks the request and picks an implementation for the platform.

    attention_dense     all scores in memory; dropout, additive masks, short sequences
    attention_chunked   blocks with an own derivative; every backend, memory linear in the sequence
    attention_tpu       splash attention (Pallas)
    attention_gpu       cuDNN flash attention

Without `implementation` the platform is JAX's default backend, or the one named by
`target_platform` (a planner that compiles for a TPU on a laptop). What an accelerator's kernel
cannot do goes to the portable forms, which give the same values; a form asked for by name that
cannot do it is an error.

Shapes: B = sequences, N = query heads, K = key/value heads, T = queries, S = keys, H = head size.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from headrace.errors import ConfigError
from headrace.kernels.attention_chunked import chunked_attention
from headrace.kernels.attention_dense import dense_attention
from headrace.kernels.attention_gpu import cudnn_attention, cudnn_obstacles
from headrace.kernels.attention_tpu import splash_attention, splash_obstacles
from headrace.kernels.masks import MaskArrays, MaskRule

Implementation = Literal["dense", "chunked", "splash", "cudnn"]

# Below this many scores in a head, or queries (decoding), the dense form is faster.
DENSE_SCORES, DENSE_QUERIES = 96 * 96, 16

_target_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "headrace_target_platform", default=None
)


@contextlib.contextmanager
def target_platform(platform: Literal["tpu", "gpu", "cpu"]) -> Generator[None]:
    """Trace for `platform` instead of the default backend. Not part of jit's cache key."""
    token = _target_platform.set(platform)
    try:
        yield
    finally:
        _target_platform.reset(token)


def traced_platform() -> str:
    """The platform that programs are traced for now: `target_platform`'s, else JAX's default."""
    return _target_platform.get() or jax.default_backend()


def attention(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    padding_mask: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """softmax(scale * q k^T, masked) v, as [B, N, T, v's head size] in q's dtype.

    Args:
      causal: query i sees keys 0..i, counted from the beginning also when T != S (as in torch).
      window: tokens. With `causal`, 0 <= i - j < window; without, |i - j| <= window.
      softcap: scores become softcap * tanh(scores / softcap) before masking.
      padding_mask: bool [B, S], True = the key may be attended.
      segment_ids: int32 [B, T]; equal ids attend, also id 0 (padding) to itself. Needs T == S.
      mask: broadcastable to [B, N, T, S]. bool: True = visible. Floating: added to the scores.
      sinks: [N], one more score in each softmax whose value is zero (gpt-oss).
      dropout: probability of dropping an attention probability; needs `key`.

    A row hidden completely by bool masks gives zeros and no gradient; one hidden by an additive
    finfo.min is uniform, as in PyTorch. Gradients exist for q, k, v, sinks and an additive mask.

    Raises ConfigError with all problems of the request. Dropout and additive masks keep [T, S]
    scores of every head in memory; all else is linear in T and S, except short sequences.
    """
    additive = mask is not None and mask.dtype != jnp.bool_
    _check(q_BNTH, k_BKSH, v_BKSH, window, softcap, padding_mask, segment_ids, mask, sinks)
    _check_dropout(dropout, key)
    rule = MaskRule(causal=causal, window=window)
    arrays = MaskArrays(padding_mask, segment_ids, None if additive else _rank_4(mask))
    bias = _rank_4(mask) if additive else None
    obstacles = _obstacles(q_BNTH, k_BKSH, v_BKSH, rule, softcap, arrays, bias, sinks, dropout)
    if implementation is None:
        implementation = _choose(obstacles, q_BNTH.shape[2], k_BKSH.shape[2])
    elif obstacles[implementation]:
        raise ConfigError(
            f"attention(implementation={implementation!r}) cannot do what was asked:\n  "
            + "\n  ".join(obstacles[implementation])
            + "\nLeave implementation out to have a suitable form chosen."
        )
    q, k, v = q_BNTH, k_BKSH, v_BKSH
    if implementation == "dense":
        return dense_attention(
            q,
            k,
            v,
            scale=scale,
            rule=rule,
            softcap=softcap,
            arrays=arrays,
            bias_BNTS=bias,
            sinks_N=sinks,
            dropout=dropout,
            key=key,
        )
    if implementation == "cudnn":
        return cudnn_attention(q, k, v, scale=scale, rule=rule, arrays=arrays, bias_BNTS=bias)
    form = splash_attention if implementation == "splash" else chunked_attention
    return form(q, k, v, scale=scale, rule=rule, softcap=softcap, arrays=arrays, sinks_N=sinks)


def _rank_4(mask: Array | None) -> Array | None:
    return None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _obstacles(
    q: Array,
    k: Array,
    v: Array,
    rule: MaskRule,
    softcap: float | None,
    arrays: MaskArrays,
    bias: Array | None,
    sinks: Array | None,
    dropout: float,
) -> dict[Implementation, list[str]]:
    """For every implementation the reasons why it cannot serve this request."""
    only_dense: list[str] = []
    if dropout > 0.0:
        only_dense.append(f"dropout={dropout}: only 'dense' draws dropout")
    chunked = list(only_dense)
    if bias is not None:
        chunked.append(f"additive mask {bias.shape}: needs 'dense' (its gradient is [T, S] anyway)")
    return {
        "dense": [],
        "chunked": chunked,
        "splash": chunked + splash_obstacles(q, k, v, arrays),
        "cudnn": only_dense + cudnn_obstacles(q, k, v, rule, softcap, arrays, bias, sinks),
    }


def _choose(
    obstacles: dict[Implementation, list[str]], num_queries: int, num_keys: int
) -> Implementation:
    platform = traced_platform()
    small = num_queries * num_keys < DENSE_SCORES or num_queries < DENSE_QUERIES
    if platform == "tpu" and not obstacles["splash"] and not small:
        return "splash"
    if platform == "gpu" and not obstacles["cudnn"]:
        return "cudnn"
    return "dense" if small or obstacles["chunked"] else "chunked"


def _check(
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    softcap: float | None,
    padding_mask: Array | None,
    segment_ids: Array | None,
    mask: Array | None,
    sinks: Array | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ConfigError(
            f"attention was given q {q.shape}, k {k.shape}, v {v.shape}; it needs q [B, N, T, H], "
            "k [B, K, S, H] and v [B, K, S, head size of v]. Transpose heads before tokens."
        )
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    problems: list[str] = []

    def need(holds: bool, given: str, needed: str) -> None:
        if not holds:
            problems.append(f"{given}; needed: {needed}")

    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    need(
        k.shape[0] == B and v.shape[:3] == k.shape[:3] and k.shape[3] == H, shapes, "B, S, H equal"
    )
    need(
        N % K == 0, f"{N} query heads, {K} key/value heads", "a whole number of queries a key head"
    )
    need(q.dtype == k.dtype == v.dtype, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "one dtype")
    need(window is None or window > 0, f"window={window}", "a positive number of tokens, or None")
    need(softcap is None or softcap > 0, f"softcap={softcap}", "a positive number, or None")
    if padding_mask is not None:
        given = f"padding_mask {padding_mask.dtype} {padding_mask.shape}"
        need(
            padding_mask.dtype == jnp.bool_ and padding_mask.shape == (B, S), given, f"bool {B, S}"
        )
    if segment_ids is not None:
        given = f"segment_ids {segment_ids.shape} with T={T}, S={S}"
        need(segment_ids.shape == (B, T) and T == S, given, f"{B, T} and T == S")
    if sinks is not None:
        need(sinks.shape == (N,), f"sinks {sinks.shape}", f"{(N,)}")
    if mask is not None:
        given, target = f"mask {mask.dtype} {mask.shape}", (B, N, T, S)
        shape = (1,) * (4 - mask.ndim) + mask.shape
        fits = len(shape) == 4 and all(a in (1, b) for a, b in zip(shape, target, strict=True))
        need(fits, given, f"broadcastable to {target}")
        known = mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)
        need(known, given, "bool (True = visible) or floating (added to the scores)")
    if problems:
        raise ConfigError("attention cannot run:\n  " + "\n  ".join(problems))


def _check_dropout(dropout: float, key: Array | None) -> None:
    if not 0.0 <= dropout < 1.0 or (dropout > 0.0 and key is None):
        raise ConfigError(
            f"attention was given dropout={dropout} and key={key}; it needs 0 <= dropout < 1 and, "
            "when it is above 0, a PRNG key. Pass key=jax.random.fold_in(step_key, layer)."
        )
