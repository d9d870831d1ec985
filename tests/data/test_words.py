"""Words with tags, and masking: where labels stand, what is drawn, what bad rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data_samples import byte_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headrace.config import TrainConfig
from headrace.data import load_data
from headrace.data.examples import IGNORED
from headrace.data.loader import LoaderState
from headrace.errors import DataError


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT's kind: [CLS] and [SEP] around, words in pieces."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "par",
        "##is",
        "anna",
        "in",
        "lives",
        "x",
    ]
    core = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def tagged(rows: Any, **settings: Any) -> Any:
    config = TrainConfig(task="token-classification", **settings)
    return load_data(config, wordpiece(), train_dataset=rows)


ROW = {"tokens": ["Anna", "lives", "in", "Paris"], "ner_tags": ["B-PER", "O", "O", "B-LOC"]}


def test_the_first_token_of_a_word_carries_its_tag() -> None:
    data = tagged([ROW, {"tokens": ["Paris"], "ner_tags": ["B-LOC"]}])
    assert data.labels.names == ("B-LOC", "B-PER", "O")
    examples = data.train.rows.examples
    assert examples.input_ids[examples.span(0)].tolist() == [2, 7, 9, 8, 5, 6, 3]
    assert examples.token_labels[examples.span(0)].tolist() == [
        IGNORED, 1, 2, 2, 0, IGNORED, IGNORED,
    ]  # fmt: skip
    assert "Anna/B-PER lives/O in/O Paris/B-LOC" in str(data.train.report)


def test_cutting_keeps_special_tokens_and_drop_drops() -> None:
    rows = [ROW, {"tokens": ["x"] * 3, "ner_tags": ["O"] * 3}]
    examples = tagged(rows, max_length=6).train.rows.examples
    assert examples.input_ids[examples.span(0)].tolist() == [2, 7, 9, 8, 5, 3]
    assert len(tagged(rows, max_length=6, over_length="drop").train.rows) == 1
    with pytest.raises(DataError, match=r"row 1 \(7\)"):
        tagged(rows, max_length=6, over_length="error")


def test_class_ids_get_the_names_the_dataset_declares() -> None:
    import datasets

    names = datasets.Sequence(datasets.ClassLabel(names=["O", "B-LOC"]))
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": names}
    )
    rows = datasets.Dataset.from_dict(
        {"tokens": [["in", "Paris"], ["x"]], "ner_tags": [[0, 1], [0]]}, features=features
    )
    assert tagged(rows).labels.names == ("O", "B-LOC")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "needs 2 tags, one a word; there are 1"),
        ({"tokens": [], "ner_tags": []}, "needs a list of words"),
        ({"tokens": ["a"], "ner_tags": 3}, "needs a list"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        tagged([ROW, row])
    assert "row 2" in str(error.value)


def test_unknown_tags_in_evaluation_are_named_with_their_row() -> None:
    config = TrainConfig(task="token-classification")
    with pytest.raises(DataError, match=r"eval_dataset, row 2.*B-LOX.*did you mean 'B-LOC'"):
        load_data(
            config, wordpiece(), train_dataset=[ROW],
            eval_dataset=[ROW, {"tokens": ["x"], "ner_tags": ["B-LOX"]}],
        )  # fmt: skip


def test_byte_level_words_have_a_blank_before_them() -> None:
    config = TrainConfig(task="token-classification")
    data = load_data(
        config, byte_tokenizer(), train_dataset=[{"tokens": ["the", "card"], "tags": ["O", "X"]}]
    )
    examples = data.train.rows.examples
    assert byte_tokenizer().decode(examples.input_ids).strip() == "the card"
    assert np.count_nonzero(examples.token_labels != IGNORED) == 2


def masked(rows: Any, **settings: Any) -> Any:
    return load_data(TrainConfig(task="masked-lm", **settings), wordpiece(), train_dataset=rows)


def test_masks_are_berts_and_follow_from_seed_epoch_and_row() -> None:
    rows = [{"text": "anna lives in paris " * 20}] * 200
    config = TrainConfig(task="masked-lm", max_length=96, seed=3)
    data = load_data(config, wordpiece(), train_dataset=rows)
    loader = data.train_loader(config)
    clean = data.train.rows.examples
    drawn = kept = changed = special = total = 0
    for step in loader.epoch(LoaderState()):
        ids, labels = step.batch["input_ids"], step.batch["labels"]
        where = labels != IGNORED
        drawn += where.sum()
        total += (step.batch["attention_mask"] > 0).sum()
        kept += (ids[where] == labels[where]).sum()
        changed += (ids[where] == 4).sum()
        special += np.isin(labels[where], [0, 2, 3]).sum()
    assert special == 0, "special tokens are never predicted"
    assert drawn / total == pytest.approx(0.15, abs=0.01)
    assert changed / drawn == pytest.approx(0.8, abs=0.03)
    assert 0.09 < kept / drawn < 0.14, "10 % stay, and a random token may be the same"
    assert (clean.input_ids != 4).all(), "the data itself is not masked"
    first = data.train.rows.batch([5, 9], 96, draw=(3, 0))
    alone = data.train.rows.batch([9], 96, draw=(3, 0))
    later = data.train.rows.batch([9], 96, draw=(3, 1))
    assert np.array_equal(first["input_ids"][1], alone["input_ids"][0])
    assert not np.array_equal(alone["labels"], later["labels"])


def test_long_texts_may_be_split() -> None:
    data = masked([{"text": "anna lives in " * 10}], max_length=16, over_length="split")
    examples = data.train.rows.examples
    assert len(examples) == 3
    assert all(examples.input_ids[examples.span(i)][0] == 2 for i in range(3))
    assert int((examples.token_labels != IGNORED).sum()) == 30


def test_masking_needs_a_mask_token() -> None:
    with pytest.raises(DataError, match="no mask token"):
        load_data(TrainConfig(task="masked-lm"), byte_tokenizer(), train_dataset=[{"text": "a"}])
