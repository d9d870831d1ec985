"""Tiny random models of the families that must pass, built from their configs alone.

Every entry gives a fresh model in train mode with dropout 0 and the keyword inputs of one training
step, labels included. Sizes are small but keep what is special: grouped heads, sliding and full
layers, shared keys and values, several experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

Inputs = dict[str, Any]

_DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
    "pad_token_id": 0,
}


def causal_inputs(vocab: int = 96, length: int = 13) -> Inputs:
    """Tokens, their labels with a masked prompt, and a padding mask with one short row."""
    ids = torch.randint(3, vocab, (2, length))
    labels = ids.clone()
    labels[:, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    labels[1, -4:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classification_inputs(vocab: int = 96, length: int = 11) -> Inputs:
    """Tokens with padding, one label a row."""
    ids = torch.randint(3, vocab, (2, length))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2])}


def seq2seq_inputs(vocab: int = 96) -> Inputs:
    """Source tokens with padding, target labels of another length."""
    inputs = classification_inputs(vocab, 9)
    return {**inputs, "labels": torch.randint(3, vocab, (2, 7))}


def image_inputs(size: int = 32) -> Inputs:
    """Two images and their classes."""
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 2])}


def _decoder(kind: str, **changes: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        config = getattr(tf, kind + "Config")(**{**_DECODER, **changes})
        return getattr(tf, kind + "ForCausalLM")(config), causal_inputs()

    return build


def _encoder(
    kind: str, head: str = "ForSequenceClassification", **changes: Any
) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        config = getattr(tf, kind + "Config")(**{**_ENCODER, **changes})
        return getattr(tf, kind + head)(config), classification_inputs()

    return build


def _gemma3() -> tuple[nn.Module, Inputs]:
    config = tf.Gemma3TextConfig(
        **{**_DECODER, "num_hidden_layers": 8},
        head_dim=8,
        sliding_window=5,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        query_pre_attn_scalar=8,
    )
    return tf.Gemma3ForCausalLM(config), causal_inputs()


def _gemma4(**changes: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        config = tf.Gemma4TextConfig(
            **{**_DECODER, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}
            | {
                "sliding_window": 5,
                "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 96,
                "num_kv_shared_layers": 0,
            }
            | changes
        )
        return tf.Gemma4ForCausalLM(config), causal_inputs()

    return build


def _deberta_v3() -> tuple[nn.Module, Inputs]:
    config = tf.DebertaV2Config(
        **_ENCODER,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        pooler_dropout=0.0,
        pooler_hidden_size=32,
    )
    inputs = classification_inputs()
    # Its own loss selects rows by `(labels >= 0).nonzero()`, a shape that depends on values; the
    # trainer computes the loss from the logits, which are compared here.
    del inputs["labels"]
    return tf.DebertaV2ForSequenceClassification(config), inputs


def _vit() -> tuple[nn.Module, Inputs]:
    config = tf.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return tf.ViTForImageClassification(config), image_inputs()


def _resnet() -> tuple[nn.Module, Inputs]:
    config = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3], num_labels=3, layer_type="bottleneck"
    )
    return tf.ResNetForImageClassification(config), image_inputs()


def _t5() -> tuple[nn.Module, Inputs]:
    config = tf.T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config), seq2seq_inputs()


def _bart() -> tuple[nn.Module, Inputs]:
    config = tf.BartConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
    )
    return tf.BartForConditionalGeneration(config), seq2seq_inputs()


def _gpt2() -> tuple[nn.Module, Inputs]:
    config = tf.GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return tf.GPT2LMHeadModel(config), causal_inputs()


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=5),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": _gemma3,
    "gemma4": _gemma4(),
    "gemma4-kv": _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4-e": _gemma4(hidden_size_per_layer_input=4, num_kv_shared_layers=2),
    "phi3": _decoder("Phi3"),
    "gpt2": _gpt2,
    "gpt_neox": _decoder("GPTNeoX"),
    "olmo2": _decoder("Olmo2"),
    "smollm3": _decoder("SmolLM3", num_hidden_layers=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _decoder("Qwen3Moe", head_dim=8, **_MOE),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta", pad_token_id=1),
    "distilbert": _encoder(
        "DistilBert",
        n_layers=3,
        dim=32,
        hidden_dim=48,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    ),
    "modernbert": _encoder(
        "ModernBert",
        local_attention=6,
        num_hidden_layers=7,
        global_attn_every_n_layers=3,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "deberta_v3": _deberta_v3,
    "electra": _encoder("Electra", embedding_size=16),
    "vit": _vit,
    "resnet": _resnet,
    "t5": _t5,
    "bart": _bart,
}


def build(name: str) -> tuple[nn.Module, Inputs]:
    """The model in train mode and its inputs, the same for every call; weights are not at zero."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train(), inputs
