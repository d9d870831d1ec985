"""Attention on NVIDIA GPUs: cuDNN's flash attention through jax.nn.dot_product_attention.

Causal and windowed masks cost nothing there. Padding, segments and bool masks reach cuDNN as one
[B, heads of the mask, T, S] bias in the input dtype, which is refused above `MASK_BYTES`.

Shapes: B = sequences, N = query heads, K = key/value heads, T = queries, S = keys, H = head size.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from headrace.kernels.masks import MaskArrays, MaskRule, visible_BNTS

MASK_BYTES = 2**30
HEAD_LIMIT, HEAD_LIMIT_BEFORE_HOPPER = 256, 128


def cudnn_obstacles(
    q: Array,
    k: Array,
    v: Array,
    rule: MaskRule,
    softcap: float | None,
    arrays: MaskArrays,
    bias: Array | None,
    sinks: Array | None,
) -> list[str]:
    """Why cuDNN cannot serve this request; empty when it can."""
    B, _, T, H = q.shape
    S = k.shape[2]
    reasons: list[str] = []
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"dtype {q.dtype}: cuDNN takes bfloat16 and float16")
    limit = HEAD_LIMIT if _is_hopper_or_later() else HEAD_LIMIT_BEFORE_HOPPER
    if v.shape[-1] != H or H % 8 or limit < H:
        reasons.append(
            f"head sizes {H} and {v.shape[-1]}: cuDNN needs equal multiples of 8 up to {limit}"
        )
    if softcap is not None:
        reasons.append(f"softcap={softcap}: cuDNN has no soft-capping")
    if sinks is not None:
        reasons.append("sinks: cuDNN through JAX has none")
    if rule.window is not None and (not rule.causal or T != S):
        reasons.append("window: cuDNN has it with a causal mask and T == S only")
    if rule.causal and T != S:
        reasons.append(f"causal with T={T}, S={S}: cuDNN's alignment is not torch's")
    if arrays.any() or bias is not None:
        heads = max([x.shape[1] for x in (arrays.mask_BNTS, bias) if x is not None], default=1)
        size = B * heads * T * S * q.dtype.itemsize
        if T % 2 or S % 2:
            reasons.append(f"T={T}, S={S} with a mask: cuDNN needs even lengths")
        if size > MASK_BYTES:
            reasons.append(f"the mask would take {size} bytes; more than {MASK_BYTES} is refused")
    return reasons


def cudnn_attention(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    scale: float,
    rule: MaskRule,
    arrays: MaskArrays = MaskArrays(),  # noqa: B008 - immutable
    bias_BNTS: Array | None = None,
    backend: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """The values of `dense_attention` from cuDNN. `backend="xla"` is for tests without a GPU."""
    T, S = q_BNTH.shape[2], k_BKSH.shape[2]
    keep = None
    if arrays.any():
        everywhere = MaskRule(causal=False)
        keep = visible_BNTS(everywhere, arrays, T, S)
    out_BTNH = jax.nn.dot_product_attention(
        q_BNTH.swapaxes(1, 2),
        k_BKSH.swapaxes(1, 2),
        v_BKSH.swapaxes(1, 2),
        bias=None if bias_BNTS is None else bias_BNTS.astype(q_BNTH.dtype),
        mask=keep,
        scale=scale,
        is_causal=rule.causal and rule.window is None,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation=backend,
    )
    out = out_BTNH.swapaxes(1, 2)
    if keep is None:
        return out
    # cuDNN is uniform where a row sees nothing.
    whole = visible_BNTS(rule, arrays, T, S)
    assert whole is not None
    return jnp.where(whole.any(axis=-1)[..., None], out, 0.0)


def _is_hopper_or_later() -> bool:
    if jax.default_backend() != "gpu":
        return True
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return math.floor(float(capability)) >= 9
