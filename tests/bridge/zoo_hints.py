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
    "bros": {"hidden_size": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
            "full_attention": {**_ROPE, "mrope_section": [2, 1, 1]},
        },
    },
    # The model reads each stage's drop rates at the stage's own index.
    "cvt": {"depth": (1, 2, 3)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"window_size": 2},
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
    "hgnet_v2": {
        "stem_channels": (3, 8, 8),
        "stage_in_channels": (8, 8, 16, 32),
        "stage_mid_channels": (8, 8, 8, 8),
        "stage_out_channels": (8, 16, 32, 64),
        "stage_numb_of_layers": (2, 2, 2, 2),
    },
    "layoutlmv3": {
        "coordinate_size": 5,
        "shape_size": 6,
        "max_rel_pos": ...,
        "max_rel_2d_pos": ...,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "levit": {"hidden_sizes": (16, 32, 48), "image_size": 64},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"qk_head_dim": 16},
    "lxmert": {"num_qa_labels": 16},
    "mamba2": {"num_heads": 8},
    "mpnet": {"relative_attention_num_buckets": ...},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron3_diarization": {"chunk_length": ..., "num_speakers": ...},
    "neomme": {"head_dim": 16},
    "pp_lcnet": {"scale": 0.125, "class_expand": 32},
    "perceiver": {
        "max_position_embeddings": 12,
        "image_size": 32,
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": (3, 4), "axial_pos_embds_dim": (16, 16)},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 9, "no_token_index": 10},
    # At the last stage the feature map must not be smaller than a window.
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "swiftformer": {"embed_dims": (16, 16, 32, 32)},
    "textnet": {"stem_out_channels": 8},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": ...},
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


def _image_among_text(model: Any) -> dict[str, Any]:
    ids = torch.randint(8, 70, (2, 12))
    ids[:, 2:6] = model.config.image_token_index
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == model.config.image_token_index).long(),
        "pixel_values": torch.randn(2, 3, 64, 64),
        "labels": None,
    }


def _boxes(_model: Any) -> dict[str, Any]:
    left_top = torch.randint(0, 30, (2, 12, 2))
    return {"bbox": torch.cat([left_top, left_top + torch.randint(1, 30, (2, 12, 2))], -1)}


def _regions(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "visual_feats": torch.randn(2, 5, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 5, config.visual_pos_dim),
        "labels": torch.randint(0, config.num_qa_labels, (2,)),
    }


def _three_separators(model: Any) -> dict[str, Any]:
    ids = torch.randint(8, 70, (2, 12))
    ids[:, [4, 5, 8]] = model.config.sep_token_id
    return {"input_ids": ids}


def _frames(model: Any) -> dict[str, Any]:
    audio = model.config.audio_config
    each = 2 * model.config.downsample_factor  # frames of one token
    return {"input_features": torch.randn(2, audio.num_mel_bins, 12 * each)}


INPUT_HINTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "seq2seq-lm/fsmt": lambda _: {"labels": torch.randint(8, 70, (2, 12))},
    "bros": lambda _: {"bbox": torch.rand(2, 12, 8)},
    "causal-lm/git": _pixels,
    "image-classification/imagegpt": lambda _: {"input_ids": torch.randint(0, 90, (3, 12))},
    "image-classification/shieldgemma2": _image_among_text,
    "image-classification/siglip2": _siglip2,
    "layoutlm": _boxes,
    "layoutlmv3": lambda model: _boxes(model) | _pixels(model),
    "lilt": _boxes,
    "lxmert": _regions,
    "seq2seq-lm/voxtral_realtime": _frames,
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "question-answering/longformer": _three_separators,
}
