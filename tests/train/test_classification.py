"""ClassificationTrainer from rows to files that stock libraries read; a bfloat16 run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaForCausalLM,
)

from headrace.config import ClassificationConfig, SFTConfig
from headrace.errors import ConfigError
from headrace.train import ClassificationTrainer, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def config(output_dir: Path, **changes: Any) -> ClassificationConfig:
    settings: dict[str, Any] = {
        "output_dir": str(output_dir), "max_steps": 200, "per_device_train_batch_size": 16,
        "logging_steps": 10, "save_strategy": "steps", "save_steps": 20, "max_length": 16,
        "eval_strategy": "steps", "eval_steps": 20, "learning_rate": 5e-3, "warmup_steps": 10,
        "compilation_cache_dir": None, "bucket_count": 1,
    }  # fmt: skip
    return ClassificationConfig(**(settings | changes))


def stock_logits(model: Any, texts: list[str]) -> np.ndarray:
    batch = tiny.tokenizer()(texts, padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits.numpy()


def test_whole_model_learns_keeps_the_best_and_reloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.saved(tiny.bert(num_labels=2), tmp_path / "base")
    out = tmp_path / "out"
    rows, held = tiny.label_rows(300), tiny.label_rows(70, 1)
    trainer = ClassificationTrainer(
        folder,
        config(
            out, load_best_model_at_end=True, metric_for_best_model="f1_macro", save_total_limit=1,
            eval_strategy="steps",
        ),
        train_dataset=rows,
        eval_dataset=held,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        compute_metrics=lambda p: {"own": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )  # fmt: skip
    trainer.train()
    assert (
        "new weights, from seed 42: classifier.bias, classifier.weight" in capsys.readouterr().out
    )
    history = [e for e in trainer.state.log_history if "eval_f1_macro" in e]
    best = max(e["eval_f1_macro"] for e in history)
    assert best > 0.9, "which animal is named is easy to see"
    assert trainer.state.best_metric == best
    metrics = trainer.evaluate()
    assert metrics["eval_f1_macro"] == pytest.approx(best), "the best weights are the ones in use"
    assert metrics["eval_own"] == pytest.approx(metrics["eval_accuracy"])
    assert trainer.state.global_step < 200, "early stopping never acted"

    stock = AutoModelForSequenceClassification.from_pretrained(out)
    assert stock.config.id2label == {0: "bird", 1: "cat", 2: "dog"}
    predicted = stock_logits(stock, [row["text"] for row in held]).argmax(-1)
    names = np.array([stock.config.id2label[int(i)] for i in predicted])
    accuracy = float((names == np.array([row["label"] for row in held])).mean())
    assert accuracy == pytest.approx(metrics["eval_accuracy"])


def test_lora_classifier_saves_its_head(tmp_path: Path) -> None:
    folder = tiny.saved(tiny.bert(num_labels=3), tmp_path / "base")
    out = tmp_path / "out"
    trainer = ClassificationTrainer(
        folder,
        config(
            out,
            max_steps=8,
            eval_strategy="no",
            save_strategy="no",
            warmup_steps=0,
            learning_rate=2e-2,
        ),
        train_dataset=tiny.label_rows(90),
        peft_config=LoraConfig(r=4, target_modules=["query", "value"]),  # no task_type, as many do
    )
    output = trainer.train()
    assert output.metrics["load_back_max_difference"] < 1e-5
    assert json.loads((out / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    trained = {n for k in trainer.train_state.trainable for n in trainer.run.module.layout.keys[k]}
    assert any("classifier.modules_to_save" in name for name in trained)
    base = BertForSequenceClassification.from_pretrained(folder)
    texts = [row["text"] for row in tiny.label_rows(5, 2)]
    before = stock_logits(base, texts)
    after = stock_logits(PeftModel.from_pretrained(base, out), texts)
    assert np.abs(after - before).max() > 0.05


def test_head_and_labels_must_fit(tmp_path: Path) -> None:
    trainer = ClassificationTrainer(
        tiny.bert(num_labels=2), config(tmp_path, eval_strategy="no"),
        train_dataset=tiny.label_rows(60), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the model has 2 outputs, the data 3 labels"):
        _ = trainer.run


def test_bfloat16_run_names_what_does_not_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.llama()
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(tmp_path), dtype="bfloat16", max_steps=6, logging_steps=1, max_length=24,
            per_device_train_batch_size=2, learning_rate=1e-2, compilation_cache_dir=None,
        ),
        train_dataset=tiny.text_rows(40),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    output = trainer.train()
    shown = capsys.readouterr().out
    assert "1 trainable parameters had no gradient in 3 steps and are not learning: unused" in shown
    assert {str(v.dtype) for v in trainer.train_state.trainable.values()} == {"float32"}
    assert {str(v) for v in trainer.run.dtypes.values()} == {"bfloat16"}
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert losses[-1] < losses[0] - 0.1
    assert LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert 0 <= output.metrics["load_back_max_difference"] < 0.05
