"""Greedy answers of the engine against transformers' generate, family by family, in float32.

    python scripts/sweep_serving.py                  # all families, some minutes
    python scripts/sweep_serving.py llama gemma4     # some
    python scripts/sweep_serving.py --roll           # layers as loops, as on TPU and GPU

Tiny random models. Each family answers three prompts in one batch (one longer than a step's budget,
so it is cut into chunks), then each alone with its beginning from the cache. Prints one line each;
the exit code is 1 when a token differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from headrace.errors import HeadraceError
from headrace.serve import Engine, EngineOptions, SamplingParams, capture_for_serving

NUM_NEW = 16
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 0,
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 8,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "query_pre_attn_scalar": 8,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _family(kind: str, **changes: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(tf, kind + "Config")(**{**SIZES, **changes})
        return getattr(tf, kind.removesuffix("Text") + "ForCausalLM")(config)

    return build


def _gpt2() -> Any:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=256)
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _family("Llama"),
    "mistral": _family("Mistral", sliding_window=7),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3", head_dim=8),
    "gemma": _family("Gemma", head_dim=8),
    "gemma2": _family("Gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": _family("Gemma3Text", **GEMMA3),
    "gemma4": _family("Gemma4Text", **GEMMA4),
    "gemma4 k=v": _family(
        "Gemma4Text", **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4 shared": _family(
        "Gemma4Text",
        **GEMMA4 | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8},
    ),
    "phi3": _family("Phi3"),
    "gpt2": _gpt2,
    "gpt-neox": _family("GPTNeoX"),
    "olmo2": _family("Olmo2"),
    "smollm3": _family("SmolLM3"),
    "mixtral": _family("Mixtral", num_local_experts=4, **EXPERTS),
    "qwen3-moe": _family(
        "Qwen3Moe",
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=24,
        mlp_only_layers=[],
        **EXPERTS,
    ),
}


def model_of(name: str) -> Any:
    """Random weights, large enough that logits differ clearly."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def compare(name: str, *, roll: bool) -> str:
    """'' when all tokens are equal, else what differs."""
    model, rng = model_of(name), random.Random(0)
    prompts = [[rng.randrange(3, 96) for _ in range(n)] for n in (1, 5, 40)]
    want = [
        model.generate(torch.tensor([p]), max_new_tokens=NUM_NEW, do_sample=False)[0, len(p) :]
        for p in prompts
    ]
    options = EngineOptions(
        max_model_len=128, max_num_seqs=2, max_batched_tokens=32, page_size=4, warm_up=False
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with Engine(capture_for_serving(model, roll=roll), options=options) as engine:
        batched = [a[0].token_ids for a in engine.generate(prompts, params)]
        alone = [engine.generate([p], params)[0][0].token_ids for p in prompts]
        engine.check_invariants()
        if engine.stats.cached_tokens == 0:
            return "nothing came from the cache"
    for how, got in [("in a batch", batched), ("alone, from the cache", alone)]:
        for prompt, mine, theirs in zip(prompts, got, want, strict=True):
            if mine != theirs.tolist():
                return f"{how}, prompt of {len(prompt)}: {mine} for {theirs.tolist()}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=", ".join(FAMILIES))
    parser.add_argument("--roll", action="store_true", help="run layers as loops")
    args = parser.parse_args()
    failed = 0
    for name in args.families or FAMILIES:
        try:
            problem = compare(name, roll=args.roll)
        except HeadraceError as error:
            problem = f"{type(error).__name__}: {error}"
        failed += bool(problem)
        print(f"{name:<14} {problem or 'equal'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
