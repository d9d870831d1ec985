"""A tiny model of every type in transformers' auto mappings, made from its config class alone.

Every size field of a default config is shrunk by the meaning of its name; `zoo_hints.HINTS` adds
what names cannot say. Nothing here depends on an architecture's code. Models are in train mode with
every dropout at 0, so that two runs agree.

Used by `scripts/sweep` (every type) and `test_zoo.py` (a few).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from zoo_hints import HINTS, INPUT_HINTS

Inputs = dict[str, Any]

LISTS = {
    "causal-lm": "CAUSAL_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "masked-lm": "MASKED_LM",
    "image-classification": "IMAGE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
}
VOCABULARY, LENGTH, IMAGE = 96, 12, 64
_LAYERS = 2  # of each kind that a config names, so that layers still repeat


def types(name: str) -> dict[str, str]:
    """Model type -> class name of one of transformers' auto mappings."""
    mapping = getattr(modeling_auto, f"MODEL_FOR_{LISTS[name]}_MAPPING_NAMES")
    return {t: c if isinstance(c, str) else c[0] for t, c in mapping.items()}


# Name of an integer field -> its tiny value, or a function of the default; the first match counts.
_INTEGERS: list[tuple[str, Any]] = [
    (r"(type_vocab_size|num_channels|in_channels|spatial_merge_size|temporal_patch_size)", None),
    (r".*kernel.*", lambda v: min(v, 4 + v % 2)),
    (r"codebook_size", 64),
    (r".*(token_id|token_index|_index|_pad_id)", lambda v: v if v < 8 else 76 + v % 16),
    (r"(?!.*hash).*vocab_size.*|n_vocab|vocab_offset", VOCABULARY),
    (r".*hash_buckets|.*hash_byte_group_vocab|ngram_vocab_size_base|entity_.*size", 64),
    (r"(original_)?max_.*(position|pos_emb|length|seq_len).*|n_positions|n_ctx|max_seq_len", 64),
    (r"max_(source|target)_positions", 64),
    (r"(num_)?image_size|input_size", IMAGE),
    (r"patch_size", lambda v: 16 if v > 8 else v),
    (r".*(sliding_window|attention_window|local_attention)(_size|_len)?", 6),
    (r"window_size", lambda v: min(v, 4)),
    (r".*chunk_size|chunk_length|chunk_len.*|.*block_size", lambda v: min(v, 4) if v > 0 else v),
    (r".*(key_value|kv)_heads.*|kv_n_heads", 2),
    (r".*num_query_groups", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),  # with a head size of 8 twice the hidden size
    (r"n_heads|n_head|.*_heads|.*heads_per.*|.*num_heads|linear_num.*heads", 4),
    (r"head_dim|.*head_dim|d_kv|dim_head|d_head|.*_d_head|kv_channels|.*head_size|rotary_dim", 8),
    (r"query_pre_attn_scalar|head_dim_.*|d_rel", 8),
    (r".*(lora_rank|lowrank|_rank|laurel_rank|dt_rank)", lambda v: min(v, 8)),
    (r".*(n_shared_experts|num_shared_experts|zero_expert_num)", lambda v: min(v, 2)),
    (r".*(topk_group|top_k_group)", 1),
    (r"n_group|num_expert_group.*", lambda v: min(v, 2)),
    (r"(n_|num_|moe_num_).*experts|moe_num_experts|expert_num.*", 4),
    (r".*(experts_per_tok|experts_per_token|topk|top_k|moe_k|cross_attn_k).*", lambda v: min(v, 2)),
    (r".*(n_groups|ngroups|num_groups|o_groups)", lambda v: min(v, 2)),
    (r".*(state_size|d_state)", 8),
    (r"first_k_dense_replace|num_dense_layers|num_.*_dense.*", lambda v: min(v, 1)),
    (r"num_kv_shared_layers|.*mtp_layers|num_nextn_predict_layers|num_adapter_layers", None),
    (r"max_window_layers", 1),
    (r".*layers_per.*", lambda v: min(v, 2)),
    (r"(?!.*(interval|pattern|every)).*(layers|n_layer)", "layers"),
    (r".*num_buckets|.*rel.*buckets|position_buckets", lambda v: min(v, 8)),
    (r".*max_distance|max_rel.*|rel_extent", lambda v: min(v, 16)),
    (r"expert_capacity", None),
    (
        r".*(intermediate|ffn|mlp|feed_forward|d_ff|^dff$|dim_ff|d_inner).*",
        lambda v: 48 if v > 16 else v,
    ),
    (r".*num_landmarks|segment_means_seq_len", 4),
    (r".*(multiple_of|divisible_by)", lambda v: min(v, 8)),
    (r".*(hidden|size|dim|width|channels|embd|d_model|filters).*", lambda v: 32 if v > 32 else v),
]
_KEPT_LISTS = ("_out_features", "_out_indices", "out_indices", "out_features")


def tiny(kind: type[PreTrainedConfig], hints: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A small config of the class: name rules, then the hints of its `model_type`."""
    default = kind()
    hints = {**HINTS.get(default.model_type, {}), **(hints or {})}
    layers = hints.get("num_hidden_layers", _LAYERS)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = vars(default).get(field.name)
        if field.name in hints or field.name in _KEPT_LISTS:
            continue
        if isinstance(value, PreTrainedConfig):
            values[field.name] = tiny(type(value))
            continue
        small = _small(field.name, value, default, layers)
        if small is not None and small != value:
            values[field.name] = small
    if "pad_token_id" in vars(default) and default.pad_token_id is None:
        values["pad_token_id"] = 0
    names = {field.name for field in dataclasses.fields(kind)}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:  # latent attention has no groups
        values["num_key_value_heads"] = 4
    if {"head_dim", "hidden_size", "num_attention_heads"} <= names:
        values.setdefault("head_dim", 8)
    values |= {k: tiny_nested(default, k, v) for k, v in hints.items() if v is not ...}
    if "dtype" not in values:
        values["dtype"] = torch.float32
    return kind(**values)


def tiny_nested(default: PreTrainedConfig, name: str, hint: Any) -> Any:
    """A hint for a nested config is a dict of that config's hints."""
    value = vars(default).get(name)
    if isinstance(value, PreTrainedConfig) and isinstance(hint, dict):
        return tiny(type(value), hint)
    return hint


def _small(name: str, value: Any, config: PreTrainedConfig, layers: int) -> Any:
    if "drop" in name or "jitter" in name:
        return _zero(value)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return _integer(name, value, layers)
    if isinstance(value, (list, tuple)) and value:
        return _list(name, value, config, layers)
    return None


def _zero(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(0.0 for _ in value)
    return (
        type(value)(0) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    )


def _integer(name: str, value: int, layers: int) -> int | None:
    for pattern, small in _INTEGERS:
        if re.fullmatch(pattern, name):
            small = layers if small == "layers" else small
            small = small(value) if callable(small) else small
            return None if small is None or (value < small and value < 64) else small
    return None


def _list(name: str, value: Any, config: PreTrainedConfig, layers: int) -> Any:
    same = type(value)
    depth = vars(config).get("num_hidden_layers") or vars(config).get("num_layers")
    per_layer = len(value) == depth and depth > 4
    if per_layer and all(isinstance(v, str) for v in value):
        kinds = list(dict.fromkeys(value))
        # Every kind at least once.
        return same(kinds[i % len(kinds)] for i in range(max(layers, len(kinds))))
    if per_layer:
        return same(value[:layers])
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    if re.fullmatch(r".*(_idxs|_layers|layer_ids|_layers_indices)", name) and len(value) > 1:
        return same(v for v in value if v < layers)
    if name == "image_size":
        return same(IMAGE for _ in value)
    if re.fullmatch(r"depths?|num_block_repeats|stage_num.*", name):
        return same(2 if v == max(value) > 1 else min(v, 1) for v in value)
    if re.fullmatch(r"(num_)?(attention_)?heads", name):
        return same(v // math.gcd(*value) for v in value)
    if re.fullmatch(r".*(hidden_sizes|embed_dims?|channels|attn_unit_dims)", name):
        return same(8 * v // math.gcd(*value) for v in value) if max(value) > 64 else None
    return None


def config_class(class_name: str, model_type: str) -> type[PreTrainedConfig]:
    """The config that the model class itself takes: a text model may belong to a larger type."""
    model = getattr(transformers, class_name)
    own = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    return own if issubclass(own, model.config_class) else model.config_class


def build(task: str, model_type: str) -> tuple[nn.Module, Inputs]:
    """The tiny model in train mode and the keyword inputs of one training step, labels included."""
    torch.manual_seed(0)
    class_name = types(task)[model_type]
    config = tiny(config_class(class_name, model_type))
    config.num_labels = 2 if task == "question-answering" else 3
    config.use_cache = False
    generates = task == "seq2seq-lm" or config.is_encoder_decoder
    if generates and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    kind = getattr(transformers, class_name)
    if task == "causal-lm" and hasattr(config, "is_decoder"):
        config.is_decoder = config.model_type != "moshi" and not config.is_encoder_decoder
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    for module in model.modules():
        for name in ("drop_prob", "p", "dropout", "layerdrop", "dropout_p", "attention_dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model.float().train(), inputs(task, model_type, model)


def inputs(task: str, model_type: str, model: nn.Module) -> Inputs:
    """One batch for the task, cut to what `forward` takes, plus the type's own extra inputs."""
    known = inspect.signature(model.forward).parameters
    if task == "image-classification":
        size = getattr(model.config, "image_size", None)
        size = size if isinstance(size, int) else IMAGE
        made: Inputs = {
            "pixel_values": torch.randn(3, _channels(model.config), size, size),
            "labels": torch.tensor([1, 2, 0]),
        }
    else:
        causal = task == "seq2seq-lm" and not getattr(model.config, "is_encoder_decoder", False)
        made = _text("causal-lm" if causal else task)
        if task == "sequence-classification" and model.config.is_encoder_decoder:
            ends = made["attention_mask"].sum(1) - 1  # these classify the last token of a row
            made["input_ids"][torch.arange(2), ends] = model.config.eos_token_id
    made |= INPUT_HINTS.get(f"{task}/{model_type}", INPUT_HINTS.get(model_type, lambda _m: {}))(
        model
    )
    if "input_ids" not in known and "inputs" in known and "input_ids" in made:
        made["inputs"] = made.pop("input_ids")
    kwargs = any(p.kind is p.VAR_KEYWORD for p in known.values())
    optional = ("start_positions", "end_positions", "labels")
    return {
        k: v
        for k, v in made.items()
        if v is not None and (k in known or (kwargs and k in optional))
    }


def _channels(config: Any) -> int:
    found = getattr(config, "num_channels", None)
    nested = getattr(config, "vision_config", None)
    return found if isinstance(found, int) else (_channels(nested) if nested is not None else 3)


def _text(task: str) -> Inputs:
    ids = torch.randint(8, 70, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    made: Inputs = {"input_ids": ids, "attention_mask": mask}
    if task == "causal-lm":
        labels = ids.clone()
        labels[:, :3] = -100
        labels[mask == 0] = -100
        return {**made, "labels": labels}
    if task == "masked-lm":
        labels = torch.full_like(ids, -100)
        labels[:, 2:9:3] = ids[:, 2:9:3]
        return {**made, "labels": labels}
    if task == "seq2seq-lm":
        return {**made, "labels": torch.randint(8, 70, (2, 7))}
    if task == "token-classification":
        labels = torch.randint(0, 3, ids.shape)
        labels[mask == 0] = -100
        return {**made, "labels": labels}
    if task == "question-answering":
        spans = {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 5])}
        return {**made, **spans}
    return {**made, "labels": torch.tensor([0, 2])}
