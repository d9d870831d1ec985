"""Attention as one operator of the captured graph, and the mask as another.

transformers lets attention and mask functions be registered by name. While a model is captured both
point here, so a layer's attention becomes one `headrace::attention` node and its mask one
`headrace::mask` node that *says* its pattern (causal, window, padding, segments) instead of
building [B, 1, T, S] booleans. Masks with a pattern we do not know are built as transformers builds
them.

Knows: transformers' interfaces, mask patterns. Does not know: JAX.

Shapes: B = batch, N = query heads, K = key/value heads, T = queries, S = keys, H = head size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface


class _Name(str):
    """A name of our attention, which equals that of the implementation it takes the place of.

    A model that asks `_attn_implementation in ("eager", "sdpa")` wants to know whether it must put
    its sparse selection into the mask, and of which kind the mask is. Look-ups go by hash.
    """

    stands_for = "sdpa"
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or self.stands_for.__eq__(other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


class _AdditiveName(_Name):
    stands_for = "eager"


NAME = _Name("headrace")
# For models written for additive masks (no support of sdpa): they add to the mask and extend it.
ADDITIVE_NAME = _AdditiveName("headrace_additive")


@torch.library.custom_op("headrace::mask", mutates_args=())
def mask_op(
    batch_size: int,
    q_length: int,
    kv_length: int,
    causal: bool,
    window: int,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Boolean mask [B, 1, T, S], True where a query may attend to a key.

    `window` = 0 is no window; a causal window w keeps keys with 0 <= i - j < w, a bidirectional one
    |i - j| <= w (the definitions of transformers.masking_utils). `padding` [B, S] is True for real
    keys, `segments` [B, S] must be equal on both sides.
    """
    i = torch.arange(q_length)[:, None]
    j = torch.arange(kv_length)[None, :]
    keep = (j <= i) if causal else torch.ones(q_length, kv_length, dtype=torch.bool)
    if window:
        keep = keep & ((j > i - window) if causal else ((i - j).abs() <= window))
    keep = keep[None, None].expand(batch_size, 1, q_length, kv_length)
    if padding is not None:
        keep = keep & padding[:, None, None, :].to(torch.bool)
    if segments is not None:
        keep = keep & (segments[:, None, :, None] == segments[:, None, None, :])
    return keep.clone()


@mask_op.register_fake
def _(  # pyright: ignore[reportUnusedFunction]
    batch_size: int,
    q_length: int,
    kv_length: int,
    causal: bool,
    window: int,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
    layer: int,
) -> Tensor:
    """softmax(query·keyᵀ·scale + mask + bias)·value for query [B,N,T,H], key/value [B,K,S,H].

    What the operator means, in plain torch; `headrace check` compares against it. It has no dropout
    (a comparison needs none). `softcap` = 0 is none; `layer` is the model's own layer index.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        lowest = torch.finfo(query.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    elif causal and query.shape[2] > 1:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, column.float()], -1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return torch.matmul(probs.to(value.dtype), value)


attention_op = torch.library.custom_op("headrace::attention", reference_attention, mutates_args=())


@attention_op.register_fake
def _(  # pyright: ignore[reportUnusedFunction]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
    layer: int,
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a transformers mask function means."""

    causal: bool | None = None
    causal_window: int = 0
    window: int = 0
    segments: Tensor | None = None


def recognise(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function built by transformers' own combinators, else None.

    The functions carry no description, so their closures are read; anything unknown gives None and
    the caller lets transformers build the dense mask.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(causal=False)
    if getattr(mask_function, "__module__", "") != masking_utils.__name__:
        return None
    free = inspect.getclosurevars(mask_function).nonlocals
    match mask_function.__qualname__.split(".")[0]:
        case "and_masks":
            return _both([recognise(part) for part in free["mask_functions"]])
        case "sliding_window_overlay":
            return Pattern(causal_window=free["sliding_window"])
        case "sliding_window_bidirectional_overlay":
            return Pattern(window=free["sliding_window"])
        case "packed_sequence_mask_function":
            return Pattern(segments=free["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            # Positions restart with the segment, so comparing them inside one segment is comparing
            # indices.
            return recognise(free["mask_function"])
        case _:
            return None


def _both(parts: list[Pattern | None]) -> Pattern | None:
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    return Pattern(
        causal=next((p.causal for p in known if p.causal is not None), None),
        causal_window=max(p.causal_window for p in known),
        window=max(p.window for p in known),
        segments=next((p.segments for p in known if p.segments is not None), None),
    )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: one `headrace::mask` node, or the dense mask for unknown
    patterns.
    """
    pattern = recognise(mask_function)
    known = (
        pattern is not None
        and pattern.causal is not None
        and not (pattern.causal_window and not pattern.causal)
        and not (pattern.window and pattern.causal)
        and not isinstance(q_offset, torch.Tensor)
        and q_offset == kv_offset == 0
    )
    if not known:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        kwargs |= {"q_offset": q_offset, "kv_offset": kv_offset}
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    assert pattern is not None
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return mask_op(
        batch_size,
        q_length,
        kv_length,
        bool(pattern.causal),
        pattern.causal_window or pattern.window,
        padding,
        pattern.segments,
    )


def _additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """As `_mask`, with 0 where a query may attend and the least number elsewhere.

    The pattern stays with the tensor, for attention that gets it unchanged.
    """
    mask = _mask(*args, dtype=dtype, **kwargs)
    if mask is None:
        return None
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    additive = torch.where(mask, zero, torch.finfo(dtype).min)
    additive._headrace_mask = mask  # pyright: ignore[reportAttributeAccessIssue]
    return additive


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; returns [B, T, N, H] as it asks for."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    attention_mask = getattr(attention_mask, "_headrace_mask", attention_mask)
    causal = bool(is_causal) and attention_mask is None
    out = attention_op(
        query,
        key,
        value,
        attention_mask,
        position_bias,
        s_aux,
        causal,
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        float(softcap or 0.0),
        float(dropout),
        int(getattr(module, "layer_idx", None) or 0),
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
AttentionInterface.register(ADDITIVE_NAME, _attention)
AttentionMaskInterface.register(ADDITIVE_NAME, _additive_mask)


def _supported(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through the interface (its class says so, or has none of
    its own).
    """
    if not type(model)._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
        return False
    flagged = getattr(model, "_supports_attention_backend", False)
    return bool(flagged or getattr(model, "_supports_sdpa", False))


@contextlib.contextmanager
def attention_as_operator(
    module: torch.nn.Module, *, enabled: bool = True
) -> Generator[str | None]:
    """Switch every transformers model inside `module` to our attention while capturing.

    Yields the reason when a model keeps its own attention code, else None; restores everything on
    exit.
    """
    models = [m for m in module.modules() if isinstance(m, PreTrainedModel)]
    configs = _configs(models)
    before = [
        (c, c._attn_implementation_internal, getattr(c, "_experts_implementation_internal", None))
        for c in configs
    ]
    reason = None
    try:
        for model in models:
            if enabled and _supported(model):
                _switch(model)
            elif enabled:
                reason = f"{type(model).__name__} does not use transformers' attention interface"
            _static_experts(model)
        yield reason
    finally:
        for config, attention, experts in before:
            config._attn_implementation_internal = attention
            if hasattr(config, "_experts_implementation_internal"):
                config._experts_implementation_internal = experts


@contextlib.contextmanager
def without_cache(module: torch.nn.Module) -> Generator[None]:
    """Hugging Face models inside `module` keep no key/value cache: it is no part of a training
    program, and models around a text model do not hand `use_cache` on.
    """
    configs = _configs([m for m in module.modules() if isinstance(m, PreTrainedModel)])
    before = [(c, c.use_cache) for c in configs if getattr(c, "use_cache", False)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def _configs(models: list[PreTrainedModel]) -> list[Any]:
    found: dict[int, Any] = {}
    queue: list[Any] = [m.config for m in models]
    while queue:
        config = queue.pop()
        if id(config) in found:
            continue
        found[id(config)] = config
        children = (getattr(config, name, None) for name in config.sub_configs)
        queue += [child for child in children if child is not None]
    return list(found.values())


def _switch(model: PreTrainedModel) -> None:
    name = NAME if getattr(model, "_supports_sdpa", False) else ADDITIVE_NAME
    model.config._attn_implementation_internal = name  # pyright: ignore[reportPrivateUsage]
    for config in _configs([model]):
        config._attn_implementation_internal = name


def _static_experts(model: PreTrainedModel) -> None:
    """Route experts by grouped matmul: the eager form loops over the experts that were hit."""
    if type(model)._can_set_experts_implementation():  # pyright: ignore[reportPrivateUsage]
        for config in _configs([model]):
            if hasattr(config, "_experts_implementation_internal"):
                config._experts_implementation_internal = "grouped_mm"
