"""lm-evaluation-harness on local tasks: our adapter class against its own for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

lm_eval = pytest.importorskip("lm_eval", reason="needs pip install headrace[harness]")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and what it imports

WORDS = ["<s>", "</s>", "the", "cat", "dog", "sees", "likes", "red", "small", "house", "tree", "?"]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["cat", "dog house", "red tree"]
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATE = """
task: local_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "cat"
generation_kwargs: {{until: ["?"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
TEXT = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=len(WORDS), max_position_embeddings=64,
            bos_token_id=0, eos_token_id=1, initializer_range=0.6,
        )
    ).save_pretrained(place)  # fmt: skip
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="?", pad_token="</s>"
    ).save_pretrained(place)
    rng = np.random.default_rng(0)
    rows = [
        {"question": " ".join(rng.choice(WORDS[2:11], 3 + i % 4)), "label": int(rng.integers(3))}
        for i in range(12)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = place / "tasks"
    tasks.mkdir()
    for name, text in (("choice", TASK), ("answer", GENERATE), ("text", TEXT)):
        (tasks / f"{name}.yaml").write_text(text.format(path=place / "rows.jsonl"))
    return place


def scores(model: Any, folder: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=model, tasks=["local_choice", "local_answer", "local_text"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
    )  # fmt: skip


def test_the_numbers_are_those_of_the_harness_on_transformers(folder: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from headrace.evaluate.harness import HarnessModel
    from headrace.evaluate.model import load_eval_model

    ours = scores(HarnessModel(load_eval_model(folder), batch_size=4), folder)
    theirs = scores(HFLM(pretrained=str(folder), device="cpu", batch_size=4), folder)
    for task in ("local_choice", "local_answer", "local_text"):
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-4), metric
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            left, right = mine["filtered_resps"], other["filtered_resps"]
            if task == "local_answer":
                assert left == right
                continue
            first = [np.ravel(each)[0] for each in left]
            second = [np.ravel(each)[0] for each in right]
            assert np.asarray(first, float) == pytest.approx(np.asarray(second, float), abs=1e-3)
    answers = {str(s["filtered_resps"]) for s in ours["samples"]["local_answer"]}
    assert len(answers) > 3, "the model says different things"


def test_the_command_runs_tasks_and_names_unknown_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.app import run

    words = ["eval", "--model_name_or_path", str(folder), "--base", "--include-path",
             str(folder / "tasks"), "--json", "--limit", "4"]  # fmt: skip
    assert run([*words, "--tasks", "local_choice"]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert 0 <= json.loads(line)["tasks"]["local_choice"]["acc,none"] <= 1
    assert run([*words, "--tasks", "no_such_task"]) == 2
    assert "no_such_task" in capsys.readouterr().err
