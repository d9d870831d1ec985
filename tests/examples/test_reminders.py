"""The shipped reminders task: files are what the generator writes, and held out means held out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "reminders"


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    script = str(FOLDER / "make_task.py")
    subprocess.run([sys.executable, script, "--folder", str(tmp_path)], check=True)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_no_test_answer_is_in_training_and_every_row_holds_something_new() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        import make_task
        import words
    finally:
        sys.path.remove(str(FOLDER))
    train, test = rows(FOLDER / "train.jsonl"), rows(FOLDER / "test.jsonl")
    assert not {r["completion"] for r in train} & {r["completion"] for r in test}
    train_text = "\n".join(r["prompt"] for r in train)
    assert not [name for name in words.HELD_OUT_NAMES if name in train_text.split()]
    starts = [opening.split("{")[0] for opening in make_task.HELD_OUT_OPENINGS]
    for row in test:
        sentence = row["prompt"].removeprefix("Reminder: ")
        new_person = any(name in sentence for name in words.HELD_OUT_NAMES)
        assert new_person or any(sentence.startswith(start) for start in starts), sentence


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_every_answer_is_json_of_the_schema(name: str) -> None:
    for row in rows(FOLDER / name):
        answer = json.loads(row["completion"])
        assert list(answer) == ["task", "date", "time", "repeat"]
        assert answer["task"] in row["prompt"]
        assert answer["repeat"] in {None, "daily", "weekly", "monthly", "weekdays"}


def test_the_corpus_holds_no_reminder(tmp_path: Path) -> None:
    out = tmp_path / "corpus.jsonl"
    script = str(FOLDER / "make_corpus.py")
    subprocess.run([sys.executable, script, "--documents", "3000", "--out", str(out)], check=True)
    text = out.read_text(encoding="utf-8").lower()
    for word in ("remind", '\\"repeat\\"', '\\"task\\"', "weekdays"):
        assert word not in text
