"""Decoding and scoring against stock transformers, on a tiny random Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.config import TrainConfig
from headrace.errors import ConfigError, DataError
from headrace.evaluate import EvalModel, evaluate, greedy_generate, load_eval_model
from headrace.evaluate.model import capture_for_eval
from headrace.evaluate.score import score_causal

END = 0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": END} | {char: i + 1 for i, char in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def model() -> EvalModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96,
        eos_token_id=END, bos_token_id=None, pad_token_id=END, initializer_range=0.5,
    )  # fmt: skip
    return capture_for_eval(LlamaForCausalLM(config), byte_tokenizer())


def stock_answer(model: EvalModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.torch_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return [i for i in out[0, len(prompt) :].tolist() if i != END]


def test_greedy_generate_equals_stock_generate_for_ragged_prompts(model: EvalModel) -> None:
    prompts = [[5, 9, 200], [17] * 11, [3, 4, 5, 6, 7, 8]]
    ours = greedy_generate(model, prompts, max_new_tokens=12)
    assert ours == [stock_answer(model, prompt, 12) for prompt in prompts]


def test_generation_stops_at_an_end_token_and_leaves_it_out(model: EvalModel) -> None:
    [free] = greedy_generate(model, [[5, 9, 200]], max_new_tokens=8, eos_token_ids=())
    end = free[4]
    [ended] = greedy_generate(model, [[5, 9, 200]], max_new_tokens=8, eos_token_ids=(end,))
    assert ended == free[: free.index(end)]


def test_a_prompt_without_room_is_refused(model: EvalModel) -> None:
    with pytest.raises(ConfigError, match="the model has 96 positions"):
        greedy_generate(model, [[1] * 90], max_new_tokens=10)
    with pytest.raises(ConfigError, match="prompt is empty"):
        greedy_generate(model, [[1], []], max_new_tokens=2)


def batch_of(rows: list[tuple[list[int], list[int]]], size: int) -> dict[str, np.ndarray]:
    ids, labels = np.zeros((len(rows), size), np.int32), np.full((len(rows), size), -100, np.int32)
    segments = np.zeros_like(ids)
    for b, (prompt, answer) in enumerate(rows):
        both = [*prompt, *answer]
        ids[b, : len(both)], segments[b, : len(both)] = both, 1
        labels[b, len(prompt) : len(both)] = answer
    positions = np.where(segments > 0, np.arange(size), 0).astype(np.int32)
    return {
        "input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments
    }  # fmt: skip


def test_scores_equal_torch_and_exact_means_greedy_gives_the_answer(model: EvalModel) -> None:
    prompts = [[5, 9, 200], [17, 30, 2, 2], [7, 7]]
    answers = [greedy_generate(model, [p], max_new_tokens=6, eos_token_ids=())[0] for p in prompts]
    answers[1][3] = (answers[1][3] + 1) % 256  # what greedy decoding does not say
    rows = list(zip(prompts, answers, strict=True))
    scores = score_causal(model, [batch_of([*rows, ([], [])], 16)])  # the last row is filler
    assert scores.exact.tolist() == [True, False, True]

    expected = 0.0
    for prompt, answer in rows:
        ids = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            expected += float(model.torch_model(input_ids=ids, labels=labels).loss) * len(answer)
    assert scores.num_tokens == 18
    assert scores.loss == pytest.approx(expected / 18, rel=1e-5)


def config_for(**settings: Any) -> TrainConfig:
    return TrainConfig(pad_to_multiple_of=16, per_device_eval_batch_size=2, **settings)


def test_evaluate_reports_exact_match_only_where_there_is_an_answer(model: EvalModel) -> None:
    pairs = [{"prompt": f"question {i}:", "completion": f" {i * i}"} for i in range(5)]
    report = evaluate(
        config_for(), model=model, eval_dataset=pairs, num_samples=2, max_new_tokens=4
    )
    assert report.num_rows == 5
    assert report.metrics["exact_match"] == 0.0
    assert [s.expected for s in report.samples] == [" 0", " 1"]
    texts = [{"text": f"a sentence with number {i}"} for i in range(5)]
    assert "exact_match" not in evaluate(config_for(), model=model, eval_dataset=texts).metrics


def test_an_adapter_folder_answers_as_stock_peft_does(model: EvalModel, tmp_path: Path) -> None:
    model.torch_model.save_pretrained(tmp_path / "base")
    model.tokenizer.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model = get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    peft_model.save_pretrained(str(tmp_path / "adapter"))

    loaded = load_eval_model(tmp_path / "adapter")
    prompts = [[5, 9, 200], [17] * 11]
    ours = greedy_generate(loaded, prompts, max_new_tokens=8)
    assert ours == [stock_answer(loaded, prompt, 8) for prompt in prompts]
    assert ours != greedy_generate(model, prompts, max_new_tokens=8)


def test_evaluate_without_evaluation_rows_is_an_error(model: EvalModel, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "only training rows"}\n')
    with pytest.raises(DataError, match="has no split 'test'"):
        evaluate(config_for(dataset_name=str(file)), model=model)
