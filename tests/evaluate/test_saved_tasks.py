"""`headrace eval` of saved files, for every task: as training scored them, and as stock torch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
)

from headrace.cli.app import run
from headrace.config import TrainConfig
from headrace.errors import ConfigError, DataError
from headrace.evaluate import evaluate
from headrace.train import Trainer
from headrace.weights import merge_adapter

sys.path.append(str(Path(__file__).parents[1] / "train"))
import tiny  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
WORDS = tiny.WORDS
TAGGED = [
    {"tokens": row, "ner_tags": ["B-PET" if word in ("cat", "dog") else "O" for word in row]}
    for row in (WORDS[i % 5 : i % 5 + 3 + i % 4] for i in range(24))
]
PAIRS = [
    {"prompt": WORDS[i % 7], "chosen": f" cat {WORDS[i % 9]}", "rejected": f" dog {WORDS[i % 11]}"}
    for i in range(5)
]
TEXTS = [{"text": " ".join(WORDS[i % 6 : i % 6 + 5])} for i in range(5)]


def bert() -> BertConfig:
    return BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=tiny.VOCABULARY + 1, max_position_embeddings=64,
    )  # fmt: skip


def settings(task: Any, out: Path, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "task": task, "output_dir": str(out), "max_steps": 3, "learning_rate": 2e-2,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 3,
        "save_strategy": "no", "compilation_cache_dir": None, "data_cache_dir": None,
        "max_length": 16, "bucket_count": 1, "activation_checkpointing": "none",
        "model_card": False,
    }  # fmt: skip
    return TrainConfig(**(given | changes))


def as_trained(found: Any, trained: dict[str, float], rel: float) -> None:
    """The same names and values as the trainer's own evaluation, its speed aside."""
    speed = ("eval_runtime", "eval_tokens_per_second")
    expected = {k.removeprefix("eval_"): v for k, v in trained.items() if k not in speed}
    assert dict(found) == pytest.approx(expected, rel=rel, abs=1e-5)


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, dict[str, float]]:
    """A LoRA run of token classification, and what its own evaluation said at the end."""
    folder = tmp_path_factory.mktemp("tags")
    torch.manual_seed(0)
    tiny.saved(BertForTokenClassification(bert()), folder / "base")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TAGGED))
    config = settings(
        "token-classification", folder / "out", use_peft=True, lora_r=4, test_split_size=6,
        dataset_name=str(file), model_name_or_path=str(folder / "base"),
    )  # fmt: skip
    trainer = Trainer(args=config)
    trainer.train()
    return config, trainer.evaluate()


def test_a_run_folder_and_its_merged_model_score_as_training_did(
    tags: tuple[TrainConfig, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, trained = tags
    report = evaluate(config, model=config.output_dir)
    assert report.num_rows == 6
    assert {"loss", "precision", "recall", "f1", "accuracy"} == set(report.metrics)
    as_trained(report.metrics, trained, 1e-4)
    merge_adapter(config.output_dir, tmp_path / "merged")
    as_trained(evaluate(config, model=tmp_path / "merged").metrics, trained, 1e-3)

    flags = [f"--{n}={v}" for n, v in config.as_given().items() if v is not None]
    capsys.readouterr()
    assert run(["eval", *flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (shown.pop("model"), shown.pop("rows")) == (config.output_dir, 6)
    as_trained(shown, trained, 1e-4)


def test_another_task_or_rows_without_the_columns_are_refused(
    tags: tuple[TrainConfig, dict[str, float]],
) -> None:
    config, _ = tags
    other = config.replace(task="sequence-classification")
    with pytest.raises(ConfigError, match="is an adapter for token-classification, task is seq"):
        evaluate(other, model=config.output_dir)
    with pytest.raises(ConfigError, match="BertForTokenClassification, which has no head for task"):
        evaluate(other, model=config.model_name_or_path)
    with pytest.raises(DataError, match="which hold the words and their tags is not clear"):
        evaluate(config, model=config.output_dir, eval_dataset=TEXTS)


def test_labels_of_an_adapter_without_names_come_from_its_training_rows(
    tags: tuple[TrainConfig, dict[str, float]], tmp_path: Path
) -> None:
    config, trained = tags
    for file in Path(config.output_dir).iterdir():  # what PEFT and transformers alone write
        if file.is_file() and file.name != "config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    as_trained(evaluate(config, model=tmp_path).metrics, trained, 1e-4)


def adapter_of(kind: Any, folder: Path, **options: Any) -> PeftModel:
    """A base and an adapter that changes it, made and saved by stock PEFT."""
    tiny.saved(tiny.llama(), folder / "base")
    torch.manual_seed(1)
    base = kind.from_pretrained(folder / "base", **options)
    model = get_peft_model(
        base,
        LoraConfig(
            r=4,
            target_modules="all-linear",
            task_type="SEQ_CLS" if options else "CAUSAL_LM",
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder / "adapter"))
    return model.eval()


def ids_of(text: str) -> torch.Tensor:
    words = tiny.tokenizer()
    return torch.tensor([[*words(text)["input_ids"], words.eos_token_id]])


def test_reward_scores_are_those_of_stock_peft(tmp_path: Path) -> None:
    stock = adapter_of(AutoModelForSequenceClassification, tmp_path, num_labels=1)
    with torch.no_grad():
        chosen, rejected = (
            torch.stack(
                [stock(input_ids=ids_of(row["prompt"] + row[side])).logits[0, 0] for row in PAIRS]
            )
            for side in ("chosen", "rejected")
        )
    config = settings("reward", tmp_path, model_name_or_path=str(tmp_path / "base"))
    found = evaluate(config, model=tmp_path / "adapter", eval_dataset=PAIRS).metrics
    margins = chosen - rejected
    assert found["loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-4)
    assert found["rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-3)
    assert found["rewards/accuracies"] == pytest.approx(float((margins > 0).float().mean()))


def answer_logp(model: Any, row: dict[str, str], side: str) -> torch.Tensor:
    ids = ids_of(row["prompt"] + row[side])
    start = len(tiny.tokenizer()(row["prompt"])["input_ids"])
    logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logps.gather(-1, ids[0, 1:, None])[start - 1 :].sum()


def test_preference_scores_compare_with_the_base_also_when_merged(tmp_path: Path) -> None:
    stock: Any = adapter_of(AutoModelForCausalLM, tmp_path)
    margins = []
    with torch.no_grad():
        for row in PAIRS:
            now = answer_logp(stock, row, "chosen") - answer_logp(stock, row, "rejected")
            with stock.disable_adapter():
                before = answer_logp(stock, row, "chosen") - answer_logp(stock, row, "rejected")
            margins.append(0.2 * (now - before))
    expected = torch.stack(margins)
    config = settings("preference", tmp_path, model_name_or_path=str(tmp_path / "base"), beta=0.2)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    for folder in ("adapter", "merged"):
        found = evaluate(config, model=tmp_path / folder, eval_dataset=PAIRS).metrics
        assert found["loss"] == pytest.approx(float(-F.logsigmoid(expected).mean()), rel=1e-4)
        assert found["rewards/margins"] == pytest.approx(float(expected.mean()), rel=1e-3)
        assert found["rewards/accuracies"] == pytest.approx(float((expected > 0).float().mean()))
    base = evaluate(config, model=tmp_path / "base", eval_dataset=PAIRS).metrics
    assert base["loss"] == pytest.approx(math.log(2), rel=1e-6), "the base has learned nothing"


def test_masked_models_score_as_their_trainer_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertForMaskedLM(bert()).save_pretrained(tmp_path / "base")
    words = tiny.tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    words.save_pretrained(tmp_path / "base")
    config = settings(
        "masked-lm", tmp_path, model_name_or_path=str(tmp_path / "base"), mlm_probability=0.4
    )
    trained = Trainer(args=config, train_dataset=TEXTS, eval_dataset=TEXTS).evaluate()
    found = evaluate(config, model=tmp_path / "base", eval_dataset=TEXTS).metrics
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    as_trained(found, trained, 1e-5)
