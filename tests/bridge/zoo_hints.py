"""What the names of config fields cannot say, by `model_type`: constraints between fields, inputs.

HINTS are keyword arguments of the config; `...` keeps a field's default, a dict for a nested config
holds that config's hints. INPUT_HINTS make further inputs of a forward, by type or by "list/type";
an input of None is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 3
_GEMMA = {"num_hidden_layers": 6, "layer_types": _ALTERNATING, "num_kv_shared_layers": 2}

HINTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
            "full_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.5, "hidden_dim": 128},
    "esm": {"vocab_size": 96},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {**_GEMMA, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16},
    "levit": {"image_size": 224},
    "mamba2": {"num_heads": 8},
    "mpnet": {"relative_attention_num_buckets": ...},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"max_position_embeddings": 12, "image_size": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": (3, 4), "axial_pos_embds_dim": (16, 16)},
    "textnet": {"stem_out_channels": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
}


def _siglip2(model: Any) -> dict[str, Any]:
    size = model.config.vision_config.patch_size
    return {
        "pixel_values": torch.randn(3, 16, 3 * size * size),
        "pixel_attention_mask": torch.ones(3, 16, dtype=torch.int32),
        "spatial_shapes": torch.tensor([[4, 4]] * 3),
    }


def _codebooks(model: Any) -> dict[str, Any]:
    config = getattr(model.config, "decoder", model.config)
    ids = torch.randint(8, 60, (2 * config.num_codebooks, 12))
    labels = torch.randint(8, 60, (2, 12, config.num_codebooks))
    return {"input_ids": ids, "attention_mask": None, "labels": labels}


def _pixels(model: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


INPUT_HINTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "seq2seq-lm/fsmt": lambda _: {"labels": torch.randint(8, 70, (2, 12))},
    "causal-lm/git": _pixels,
    "image-classification/imagegpt": lambda _: {"input_ids": torch.randint(0, 90, (3, 12))},
    "image-classification/siglip2": _siglip2,
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
}
