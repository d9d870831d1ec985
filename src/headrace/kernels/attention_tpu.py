"""Attention on TPU: JAX's splash attention kernel, made to fit every length, head size and mask.

Sequences are padded to whole blocks. Padding masks and padded keys become segment ids, which the
kernel compares in registers; causal and windowed blocks that are hidden cost nothing. The kernel
is a Pallas call, which XLA cannot partition: on a mesh it belongs inside shard_map
(`attention_sharded`).

Shapes: B = sequences, N = query heads, K = key/value heads, T = queries, S = keys, H = head size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from headrace.kernels.attention_chunked import RESIDUALS
from headrace.kernels.masks import MaskArrays, MaskRule, visible_BNTS

LANES = 128
BLOCK = 512  # tokens; the largest block tried
HIDDEN = -1  # segment id of keys that nobody may see


def splash_obstacles(q: Array, k: Array, v: Array, arrays: MaskArrays) -> list[str]:
    """Why the kernel cannot serve this request; empty when it can."""
    reasons: list[str] = []
    if arrays.mask_BNTS is not None:
        reasons.append(f"mask {arrays.mask_BNTS.shape}: splash knows causal, window and segments")
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"dtype {q.dtype}: splash takes bfloat16 and float32")
    if max(q.shape[-1], v.shape[-1]) > 512:
        reasons.append(f"head sizes {q.shape[-1]}, {v.shape[-1]}: splash fits VMEM up to 512")
    return reasons


def splash_attention(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    *,
    scale: float,
    rule: MaskRule,
    softcap: float | None = None,
    arrays: MaskArrays = MaskArrays(),  # noqa: B008 - immutable
    sinks_N: Array | None = None,
    interpret: bool = False,
) -> Array:
    """The values of `dense_attention` from the splash kernel; differentiable in reverse mode.

    `interpret` runs the kernel on any backend, slowly; it is for tests.
    """
    N, T = q_BNTH.shape[1:3]
    S, v_size = v_BKSH.shape[2:]
    block_q, block_k = _block(T, q_BNTH.shape[-1]), _block(S, q_BNTH.shape[-1])
    padded_T, padded_S = _round_up(T, block_q), _round_up(S, block_k)
    segments = _segments(rule, arrays, q_BNTH.shape[0], T, S, padded_T, padded_S)
    kernel = _kernel(rule, N, padded_T, padded_S, block_q, block_k, softcap, interpret)
    q = _pad(q_BNTH * jnp.asarray(scale, q_BNTH.dtype), padded_T)
    k, v = _pad(k_BKSH, padded_S), _pad(v_BKSH, padded_S)
    axes = (0, 0, 0, None if segments is None else 0, None)
    out: Array = jax.vmap(kernel, in_axes=axes)(q, k, v, segments, sinks_N)  # pyright: ignore
    out = out[:, :, :T, :v_size]
    return _zero_hidden_rows(out, rule, arrays, T, S).astype(q_BNTH.dtype)


def _block(length: int, head_size: int) -> int:
    """Tokens in a block: large blocks keep the matrix unit busy; wide heads need smaller ones."""
    largest = BLOCK if head_size <= 256 else BLOCK // 2
    return min(largest, _round_up(length, LANES))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(x_BNTH: Array, length: int) -> Array:
    """Zeros up to a whole number of blocks of tokens and of lanes in the head."""
    head = x_BNTH.shape[-1]
    lanes = head if head <= LANES else _round_up(head, LANES)
    return jnp.pad(x_BNTH, ((0, 0), (0, 0), (0, length - x_BNTH.shape[2]), (0, lanes - head)))


def _segments(
    rule: MaskRule, arrays: MaskArrays, B: int, T: int, S: int, padded_T: int, padded_S: int
) -> splash.SegmentIds | None:
    """Segments, padding mask and padded keys as one pair of ids; None when nothing needs them."""
    padded_keys_are_seen = padded_S > S and not (rule.causal and padded_T <= padded_S and T <= S)
    if arrays.padding_BS is None and arrays.segments_BT is None and not padded_keys_are_seen:
        return None
    queries_BT = jnp.zeros((B, T), jnp.int32)
    keys_BS = jnp.zeros((B, S), jnp.int32)
    if arrays.segments_BT is not None:
        queries_BT = keys_BS = arrays.segments_BT.astype(jnp.int32)
    if arrays.padding_BS is not None:
        keys_BS = jnp.where(arrays.padding_BS, keys_BS, HIDDEN)
    # Padded queries take an id of their own row's last token; their outputs are cut off.
    queries_BT = jnp.pad(queries_BT, ((0, 0), (0, padded_T - T)), mode="edge")
    keys_BS = jnp.pad(keys_BS, ((0, 0), (0, padded_S - S)), constant_values=HIDDEN)
    return splash.SegmentIds(queries_BT, keys_BS)


@functools.lru_cache(maxsize=64)
def _kernel(
    rule: MaskRule,
    num_heads: int,
    num_queries: int,
    num_keys: int,
    block_q: int,
    block_k: int,
    softcap: float | None,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """Building one walks over all blocks of the mask in numpy, so equal layers share it."""
    shape = (num_queries, num_keys)
    if rule.window is not None:
        mask = splash_masks.LocalMask(shape, window_size=rule.reach, offset=0)
    elif rule.causal:
        mask = splash_masks.CausalMask(shape)
    else:
        mask = splash_masks.FullMask(shape)
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    with jax.ensure_compile_time_eval():  # the cache must not hold tracers of one program
        return splash.make_splash_mha(
            mask=splash_masks.MultiHeadMask([mask] * num_heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=blocks,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )


def _zero_hidden_rows(out: Array, rule: MaskRule, arrays: MaskArrays, T: int, S: int) -> Array:
    """Splash is uniform where a row sees nothing. Only padding or T > S can cause such a row."""
    if arrays.padding_BS is None and (T <= S or rule.window is None):
        return out
    keep = visible_BNTS(rule, arrays, T, S)  # fused into the reduction, never in memory
    assert keep is not None
    return jnp.where(keep.any(axis=-1)[..., None], out, 0.0)
