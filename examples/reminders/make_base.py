"""Tokenizer and untrained weights of the small base model, from the pretraining text.

    python examples/reminders/make_base.py --corpus corpus.jsonl --out start/

Writes a folder that stock `AutoModelForCausalLM` and `AutoTokenizer` load: a byte-level BPE
tokenizer (1,024 tokens, one token a digit) and a Llama of about two million parameters with random
weights. `headrace train examples/reminders/pretrain.yaml` then trains all of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 1024
END, PAD = "<|end|>", "<|pad|>"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; digits stay single."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The untrained Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10000.0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()

    lines = args.corpus.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer, args.seed)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {count:,} parameters, {len(tokenizer):,} tokens in the vocabulary")


if __name__ == "__main__":
    main()
