"""`headrace train`: the dry run, the help, and names that lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.text import Text

from headrace.cli.app import run
from headrace.config import TrainConfig


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_dry_run_shows_every_setting_and_its_source(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("base_model: somewhere\nuse_peft: true\n", encoding="utf-8")
    assert run(["train", str(recipe), "--seed", "5", flag]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert set(TrainConfig.model_fields) <= set(lines)
    assert lines["model_name_or_path"][1:] == ["somewhere", "recipe.yaml:1"]
    assert lines["seed"][1:] == ["5", "flag"]
    assert lines["learning_rate"][1:] == ["0.0002", "default"], "the default of a LoRA run"
    assert "base_model is called model_name_or_path here" in shown


def test_help_is_short_and_names_settings_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["train", "--help"]) == 0
    shown = Text.from_ansi(capsys.readouterr().out).plain
    assert len(shown.splitlines()) < 60
    block = shown.split("used most:")[1].split("Options")[0]
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", block))
    assert len(names) > 25
    assert names <= set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no-such-model-anywhere", "no folder of that name is here, and as a hub id it failed"),
        ("{folder}/modle", "there is no such folder. Did you mean"),
        ("{folder}/empty", "the folder holds no tokenizer that can be loaded"),
        ("{folder}/rows.jsonl", "is a file; give the folder"),
    ],
)
def test_a_model_that_is_not_there_is_one_message(
    name: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "model").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    words = ["--model_name_or_path", name.format(folder=tmp_path), "--dataset_name",
             str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")]  # fmt: skip
    assert run(["train", *words]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert expected in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_without_a_model_and_data_it_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--max_steps", "2"]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "model_name_or_path (a folder or a hub id) and dataset_name" in shown
