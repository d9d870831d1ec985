"""What is trained in a conversation, by decoding exactly the trained tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import CHATML, MARKED, THINKING, byte_tokenizer, turns
from transformers import PreTrainedTokenizerFast

from headrace.data.chat import chat_template, load_chat_template
from headrace.data.formats import detect_causal
from headrace.data.policy import Tokenized
from headrace.data.prepare import tokenize_causal
from headrace.data.read import from_python
from headrace.errors import DataError


def prepare(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **options: Any
) -> tuple[list[Tokenized], list[str]]:
    table = from_python(rows)
    return tokenize_causal(table, detect_causal(table), tokenizer, **options)


def trained_text(row: Tokenized, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The decoded runs of trained tokens."""
    runs: list[list[int]] = []
    for i in np.flatnonzero(row.trained):
        if runs and row.trained[i - 1]:
            runs[-1].append(int(row.input_ids[i]))
        else:
            runs.append([int(row.input_ids[i])])
    return [str(tokenizer.decode(run)) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_assistant_turns_with_their_end_token_are_trained(template: str) -> None:
    tokenizer = byte_tokenizer(chat_template=template)
    messages = [{"role": "system", "content": "s"}, *turns("the capital?", "Paris", "sure?", "yes")]
    rows, _ = prepare([{"messages": messages}], tokenizer)
    assert trained_text(rows[0], tokenizer) == ["Paris<|im_end|>", "yes<|im_end|>"]
    # the ids are those of the template's own tokenisation: nothing is added, nothing lost
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert rows[0].input_ids.tolist() == expected


def test_marks_that_leave_out_the_end_token_are_completed() -> None:
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = byte_tokenizer(chat_template=template)
    rows, _ = prepare([{"messages": turns("a", "b", "c", "d")}], tokenizer)
    assert trained_text(rows[0], tokenizer) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_with_train_false_are_left_out(template: str) -> None:
    tokenizer = byte_tokenizer(chat_template=template)
    messages: list[dict[str, Any]] = list(turns("a", "b", "c", "d"))
    messages[1] = {**messages[1], "train": False}
    rows, _ = prepare([{"messages": messages}], tokenizer)
    assert trained_text(rows[0], tokenizer) == ["d<|im_end|>"]


def test_all_turns_are_trained_when_asked(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    rows, _ = prepare([{"messages": turns("a", "b")}], chat_tokenizer, answers_only=False)
    assert rows[0].trained.all()


def test_a_template_that_removes_thinking_trains_the_last_turn_only_and_says_so() -> None:
    tokenizer = byte_tokenizer(chat_template=THINKING)
    thoughtful = {"messages": turns("a", "<think>x</think>b", "c", "<think>y</think>d")}
    plain = {"messages": turns("a", "b", "c", "d")}
    rows, notes = prepare([thoughtful, plain], tokenizer)
    assert trained_text(rows[0], tokenizer) == ["<think>y</think>d<|im_end|>"]
    assert trained_text(rows[1], tokenizer) == ["b<|im_end|>", "d<|im_end|>"]
    assert any("last turn only in 1 of 2 conversations" in note for note in notes)


def test_a_generation_prompt_that_opens_thinking_is_not_trained() -> None:
    template = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = byte_tokenizer(chat_template=template)
    rows, _ = prepare(
        [{"messages": turns("a", "<think>\nx</think>b")}, {"messages": turns("a", "b")}], tokenizer
    )
    assert trained_text(rows[0], tokenizer) == ["x</think>b<|im_end|>"]
    assert trained_text(rows[1], tokenizer) == ["b<|im_end|>"]


def test_characters_of_several_tokens_are_trained_whole(
    chat_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows, _ = prepare([{"messages": turns("émoji 🙂", "naïve 🙂🙂")}], chat_tokenizer)
    assert trained_text(rows[0], chat_tokenizer) == ["naïve 🙂🙂<|im_end|>"]


def test_a_template_without_an_end_token_is_reported() -> None:
    tokenizer = byte_tokenizer(
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    _, notes = prepare([{"messages": turns("a", "b")}], tokenizer)
    assert any("answers may not end" in note for note in notes)


def test_conversations_need_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="chat_template_path"):
        prepare([{"messages": turns("a", "b")}], tokenizer)


def test_a_conversation_the_template_refuses_is_a_bad_row() -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    tokenizer = byte_tokenizer(chat_template=strict + CHATML)
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a", "b")[1:]}]
    with pytest.raises(DataError, match=r"row 2.*refuses it: user first"):
        prepare(rows, tokenizer)


def test_two_begin_tokens_become_one() -> None:
    tokenizer = byte_tokenizer(chat_template="<s>" + CHATML, adds_bos=True)
    rows, notes = prepare([{"messages": turns("a", "b")}], tokenizer)
    assert rows[0].input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert not any("begin token" in note for note in notes)
    tokenizer.chat_template = "<s><s>" + CHATML
    rows, notes = prepare([{"messages": turns("a", "b")}], tokenizer)
    assert rows[0].input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert trained_text(rows[0], tokenizer) == ["b<|im_end|>"]
    assert any("second begin token was removed from 1 rows" in note for note in notes)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_plain_prompt_and_completion(adds_bos: bool) -> None:
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    rows, _ = prepare([{"prompt": "2+2=", "completion": "4"}], tokenizer)
    whole = ("<s>" if adds_bos else "") + "2+2=4<|im_end|>"
    assert tokenizer.decode(rows[0].input_ids.tolist()) == whole
    assert trained_text(rows[0], tokenizer) == ["4<|im_end|>"]
    rows, _ = prepare([{"prompt": "2+2=", "completion": "4"}], tokenizer, answers_only=False)
    assert trained_text(rows[0], tokenizer) == ["2+2=4<|im_end|>"]


def test_text_already_with_begin_and_end_tokens_gets_no_second_ones() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    rows, _ = prepare([{"text": "<s>hi<|im_end|>"}], tokenizer)
    assert tokenizer.decode(rows[0].input_ids.tolist()) == "<s>hi<|im_end|>"
    assert rows[0].trained.all()


def test_alpaca_uses_the_template_when_there_is_one(
    tokenizer: PreTrainedTokenizerFast, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"instruction": "Add", "input": "", "output": "3"}
    chat, _ = prepare([row], chat_tokenizer)
    text = chat_tokenizer.decode(chat[0].input_ids.tolist())
    assert text == "<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    plain, _ = prepare([row], tokenizer)
    text = tokenizer.decode(plain[0].input_ids.tolist())
    assert text == "### Instruction:\nAdd\n\n### Response:\n3<|im_end|>"
    off, notes = prepare([row], chat_tokenizer, use_template=False)
    assert off[0].input_ids.tolist() == plain[0].input_ids.tolist()
    assert any("not used" in note for note in notes)
    messages = {"messages": turns("Add", "3")}  # conversations are never joined as they stand
    assert prepare([messages], chat_tokenizer, use_template=False)[0][0].trained.any()


def test_history_of_alpaca_is_context_only(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    rows, _ = prepare([row], chat_tokenizer)
    assert trained_text(rows[0], chat_tokenizer) == ["d<|im_end|>"]
    assert "<|im_start|>system\ns<|im_end|>" in chat_tokenizer.decode(rows[0].input_ids.tolist())


# Shapes of templates in use: begin token written by the template, end token after a blank, roles
# renamed, content trimmed, generation prompt of several lines.
OPEN = "{% if add_generation_prompt %}<|im_start|>"
FAMILIES = {
    "inst": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "header": "{% for m in messages %}"
    "{% set head = '<|im_start|>' + m.role + '\n\n' %}{% set text = m.content | trim %}"
    "{% if loop.first %}{% set head = bos_token + head %}{% endif %}"
    "{{ head + text + '<|im_end|>' }}{% endfor %}" + OPEN + "assistant\n\n{% endif %}",
    "model": "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<|im_start|>' + role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    + OPEN
    + "model\n{% endif %}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_template_families(family: str) -> None:
    tokenizer = byte_tokenizer(chat_template=FAMILIES[family], adds_bos=True)
    messages = turns("one?", "1", "two?", "2")
    rows, notes = prepare([{"messages": messages}], tokenizer)
    texts = [text.strip() for text in trained_text(rows[0], tokenizer)]
    assert texts == ["1<|im_end|>", "2<|im_end|>"]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert rows[0].input_ids.tolist() == expected
    assert not any("last turn" in note or "begin token" in note for note in notes)


def test_chat_template_path(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert load_chat_template(str(file)) == CHATML
    byte_tokenizer(chat_template=MARKED).save_pretrained(tmp_path / "tok")
    assert load_chat_template(str(tmp_path / "tok")) == MARKED
    with pytest.raises(DataError, match="holds no chat template"):
        load_chat_template(str(tmp_path / "none"))


def test_probe_of_a_template() -> None:
    found = chat_template(byte_tokenizer(chat_template=MARKED))
    assert found is not None
    assert (found.marked, found.end_of_turn) == (True, "<|im_end|>")
    assert chat_template(byte_tokenizer()) is None
