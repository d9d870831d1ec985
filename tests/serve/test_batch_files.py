"""Files of requests: every line answered once, whatever interrupts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import DataError
from headrace.serve import Engine, SamplingParams
from headrace.serve.batch import run_batch

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_lines_are_answered_and_resumed(engine: Engine, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "Reminder: call Tom"},
        {"prompt": [5, 9, 11], "n": 2, "temperature": 1.0, "seed": 1, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "x", "temprature": 1},
        {"nothing": 1},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out" / "answers.jsonl"
    lines = [json.dumps(r) for r in rows] + ["not json", ""]
    source.write_text("\n".join(lines))
    report = run_batch(engine, source, target, GREEDY)
    assert (report.answered, report.failed, report.resumed) == (3, 3, 0)
    answers = {r["line"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert sorted(answers) == [1, 2, 3, 4, 5, 6]
    assert answers[1]["id"] == "a"
    assert len(answers[2]["answers"]) == 2
    assert "temprature" in answers[4]["error"]
    assert "not JSON" in answers[6]["error"]
    # A run that was killed: two answers and half a line.
    kept = [json.dumps(answers[1]), json.dumps(answers[3])]
    target.write_text("\n".join(kept) + '\n{"line": 2, "ans')
    report = run_batch(engine, source, target, GREEDY)
    assert (report.answered, report.failed, report.resumed) == (1, 3, 2)
    again = {r["line"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert again[2]["answers"] == answers[2]["answers"]


def test_another_file_is_not_overwritten(engine: Engine, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text('{"prompt": "x"}\n')
    target.write_text("my notes\n")
    with pytest.raises(DataError, match="not an answer file"):
        run_batch(engine, source, target, GREEDY)
    assert target.read_text() == "my notes\n"
    with pytest.raises(DataError, match="does not exist"):
        run_batch(engine, tmp_path / "absent", target, GREEDY)
