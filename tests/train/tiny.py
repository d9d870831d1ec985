"""Tiny models, a word tokenizer and rows of text, made on the spot: no hub, no files of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = [
    "the", "a", "cat", "dog", "bird", "sees", "likes", "finds", "red", "small", "old", "house",
    "tree", "now", "then", "and",
]  # fmt: skip
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
VOCABULARY = len(SPECIAL) + len(WORDS)


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", model_max_length=64,
    )  # fmt: skip


def text_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt": " ".join(rng.choice(WORDS, rng.integers(2, 5))),
            "completion": " " + " ".join(rng.choice(WORDS[:6], rng.integers(2, 6))),
        }
        for _ in range(count)
    ]


def label_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Which animal comes first: learnable from the text."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        animal = str(rng.choice(["cat", "dog", "bird"]))
        words = rng.choice(["the", "a", "red", "small", "old", "now"], rng.integers(2, 9)).tolist()
        words.insert(int(rng.integers(0, len(words))), animal)
        rows.append({"text": " ".join(words), "label": animal})
    return rows


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=64,
            bos_token_id=2, eos_token_id=3, pad_token_id=0,
        )
    )  # fmt: skip
    return model.to(dtype)


def bert(num_labels: int = 3) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=64, num_labels=num_labels,
        )
    )  # fmt: skip


def saved(model: Any, path: Path) -> str:
    """The model and tokenizer in a folder, as a user has them."""
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
