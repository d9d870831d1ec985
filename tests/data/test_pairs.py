"""Preference data: every shape of it found by looking, prompts never trained, pairs kept whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import turns
from transformers import PreTrainedTokenizerFast

from headrace.config import DPOConfig, RewardConfig
from headrace.data import load_data
from headrace.data.examples import IGNORED
from headrace.data.formats import detect_causal
from headrace.data.pairs import detect_preference
from headrace.data.read import from_python, read_table
from headrace.errors import DataError

USER = {"role": "user", "content": "Capital of France?"}
GOOD = {"role": "assistant", "content": "Paris"}
BAD = {"role": "assistant", "content": "Rome"}


def load(rows: Any, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Any:
    return load_data(DPOConfig(**settings), tokenizer, train_dataset=rows).train


def answers(dataset: Any, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """(prompt, trained text) of every answer."""
    examples = dataset.rows.examples
    found = []
    for i in range(len(examples)):
        span = examples.span(i)
        ids, trained = examples.input_ids[span], examples.token_labels[span] != IGNORED
        found.append((tokenizer.decode(ids[~trained]), tokenizer.decode(ids[trained])))
    return found


CHATS = [
    ("explicit", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
    ("implicit", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
    (
        "prompt as text beside whole conversations",
        {"prompt": "Capital of France?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ),
    (
        "text prompt, answer turns",
        {"prompt": "Capital of France?", "chosen": [GOOD], "rejected": [BAD]},
    ),
    (
        "sharegpt ranking",
        {
            "conversations": [{"from": "human", "value": "Capital of France?"}],
            "chosen": {"from": "gpt", "value": "Paris"},
            "rejected": {"from": "gpt", "value": "Rome"},
        },
    ),
    (
        "question and text answers",
        {"question": "Capital of France?", "chosen": "Paris", "rejected": "Rome"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row"), CHATS, ids=[name for name, _ in CHATS])
def test_every_shape_of_a_pair_is_the_same_chat(
    name: str, row: dict[str, Any], chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    data = load([row] * 2, chat_tokenizer)
    prompt = "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"
    good, bad = answers(data, chat_tokenizer)[:2]
    assert good == (prompt + "\n", "Paris<|im_end|>"), name
    assert bad == (prompt + "\n", "Rome<|im_end|>")
    assert data.rows.kind == "pairs"
    assert len(data.rows) == 2


def test_implicit_text_prompt_is_the_common_beginning(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {
        "chosen": "\n\nHuman: capital?\n\nAssistant: Paris it is",
        "rejected": "\n\nHuman: capital?\n\nAssistant: Pa no idea",
    }
    found = answers(load([row], tokenizer), tokenizer)
    assert found[0] == ("\n\nHuman: capital?\n\nAssistant:", " Paris it is<|im_end|>")
    assert found[1] == ("\n\nHuman: capital?\n\nAssistant:", " Pa no idea<|im_end|>")


def test_pairs_are_kept_or_dropped_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "a b", "chosen": " c", "rejected": " d"},
        {"prompt": "a b", "chosen": " c", "rejected": " d" * 60},
        {"prompt": "a b" * 40, "chosen": " c", "rejected": " d"},
    ]
    cut = load(rows, tokenizer, max_length=32)
    assert cut.report.rows_kept == 2
    assert cut.report.rows_dropped == 1, "the third has no answer within 32 tokens"
    dropped = load(rows, tokenizer, max_length=32, over_length="drop")
    assert (dropped.report.rows_kept, len(dropped.rows.examples)) == (1, 2)
    with pytest.raises(DataError, match=r"3 of 6 rows are over max_length 32|of 6 rows"):
        load(rows, tokenizer, max_length=32, over_length="error")


def test_batches_hold_both_answers_and_filler(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "chosen": " b" * (i + 1), "rejected": " c"} for i in range(3)]
    data = load(rows, tokenizer, max_length=16, pad_to_multiple_of=16)
    batch = data.rows.batch([2, -1], 16)
    assert batch["weights"].tolist() == [1.0, 0.0]
    assert (batch["segment_ids"][1] == 0).all() and (batch["rejected_labels"][1] == IGNORED).all()
    size = int(batch["segment_ids"][0].sum())
    assert tokenizer.decode(batch["input_ids"][0, :size]) == "a b b b<|im_end|>"
    other = int(batch["rejected_segment_ids"][0].sum())
    assert tokenizer.decode(batch["rejected_input_ids"][0, :other]) == "a c<|im_end|>"


def test_kto_takes_judged_answers_and_pairs(tokenizer: PreTrainedTokenizerFast) -> None:
    judged = [
        {"prompt": "a", "completion": " b", "label": True},
        {"prompt": "d", "completion": " c", "label": "false"},
    ]
    data = load(judged, tokenizer, preference_loss="kto", pad_to_multiple_of=16)
    assert data.rows.desirable.tolist() == [True, False]
    batch = data.rows.batch([0, 1], 16)
    size = int(batch["kl_segment_ids"][0].sum())
    assert tokenizer.decode(batch["kl_input_ids"][0, :size]) == "a c<|im_end|>", "another's answer"
    pairs = [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 2
    assert load(pairs, tokenizer, preference_loss="kto").rows.desirable.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "same", "rejected": "same"}, "differs from rejected"),
        ({"prompt": "a", "chosen": "", "rejected": " b"}, "text that is not empty"),
        ({"prompt": "a", "chosen": None, "rejected": " b"}, "column chosen"),
        ({"prompt": "a", "completion": "b", "label": "perhaps"}, "needs true"),
    ],
)
def test_bad_rows_are_named(
    row: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=message) as error:
        load([row], tokenizer, preference_loss="kto")
    assert "train_dataset, row 1" in str(error.value)


def test_pairs_name_the_tasks_that_use_them() -> None:
    table = from_python([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="task: preference"):
        detect_causal(table)
    with pytest.raises(DataError, match="no preference data"):
        detect_preference(from_python([{"text": "a"}]))


def test_conversations_need_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="no chat template"):
        load([{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}], tokenizer)


def test_real_pairs(real_data: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    table = read_table(str(real_data / "dpo" / "dpo_en_demo.json"))
    config = RewardConfig(max_length=512)
    data = load_data(config, chat_tokenizer, train_dataset=table).train
    assert data.report.rows_read == 300
    assert data.rows.kind == "pairs"
    examples = data.rows.examples
    assert len(examples) == 2 * data.report.rows_kept
    first = int(np.argmax(examples.token_labels[examples.span(0)] != IGNORED))
    prompt = examples.input_ids[examples.span(0)][:first]
    assert np.array_equal(prompt, examples.input_ids[examples.span(1)][:first]), "one prompt"


def test_earlier_turns_are_not_trained(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": turns("one", "two", "three"), "chosen": [GOOD], "rejected": [BAD]}
    (prompt, trained), *_ = answers(load([row], chat_tokenizer), chat_tokenizer)
    assert "two" in prompt
    assert trained == "Paris<|im_end|>"
