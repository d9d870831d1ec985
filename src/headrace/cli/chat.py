"""`headrace chat MODEL`: a conversation on the terminal.

Knows: words, the terminal. Does not know: how answers are made (`headrace.serve`).
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import engine as shared

if TYPE_CHECKING:
    from headrace.serve import Engine, SamplingParams

HELP = """\
/clear        forget the conversation
/retry        answer the last message again
/use NAME     let another adapter answer; /use base for the model without one
/help         this list
/quit, Ctrl-D end
Ctrl-C stops an answer and keeps what was written."""


def chat(
    model: Annotated[str, shared.MODEL],
    adapter: Annotated[list[str] | None, shared.ADAPTER] = None,
    use: Annotated[str | None, shared.USE] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.", min=1)] = 512,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="0: most likely.", show_default="the model's, or 0.7"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Nucleus sampling.", show_default="the model's, or 0.95"),
    ] = None,
    seed: Annotated[int | None, shared.SEED] = None,
    max_model_len: Annotated[int | None, shared.MAX_MODEL_LEN] = None,
    merge: Annotated[bool, shared.MERGE] = False,
    base: Annotated[str | None, shared.BASE] = None,
    dtype: Annotated[str, shared.DTYPE] = "auto",
    quantization: Annotated[str | None, shared.QUANTIZATION] = None,
    kv_cache_dtype: Annotated[str, shared.KV_CACHE_DTYPE] = "auto",
    tensor_parallel_size: Annotated[int, shared.TENSOR_PARALLEL] = 1,
    trust_remote_code: Annotated[bool, shared.TRUST] = False,
) -> None:
    """Talk with a model: headrace chat out/my-run

    /help lists what can be typed, Ctrl-C stops an answer, Ctrl-D ends. A model without a chat
    template continues the text of the conversation as it is.
    """
    from headrace.serve import SamplingParams

    options = shared.one_sequence(
        max_model_len=max_model_len,
        merge=merge,
        base=base,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        trust_remote_code=trust_remote_code,
    )
    with shared.engine_here(model, adapter, use, options) as (engine, chosen):
        defaults = engine.model.defaults
        given = {"temperature": temperature, "top_p": top_p}
        drawn: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, **defaults.sampling}
        drawn |= {name: value for name, value in given.items() if value is not None}
        params = SamplingParams(**drawn, seed=seed, max_tokens=max_tokens, stop=defaults.stop)
        start = [{"role": "system", "content": system}] if system else []
        talk = _Talk(engine=engine, params=params, adapter=chosen, start=start)
        talk.clear()
        typer.echo(f"{talk.name}: /help lists commands, Ctrl-D ends")
        if not talk.has_template:
            typer.echo(
                "This model has no chat template: it continues your text (\\n breaks a line)."
            )
        _read_lines(talk)


def _read_lines(talk: _Talk) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() line editing and history

    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        command, _, rest = text.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            typer.echo(HELP)
        elif command == "/clear":
            talk.clear()
        elif command == "/use":
            talk.use(rest.strip())
        elif command == "/retry":
            talk.retry()
        elif command.startswith("/") and command.count("/") == 1:
            typer.echo(f"{command} is no command; /help lists them")
        elif text.strip():
            talk.say(text)


@dataclass(kw_only=True)
class _Talk:
    """One conversation. start: what every conversation begins with."""

    engine: Engine
    params: SamplingParams
    adapter: str | None
    start: list[dict[str, str]]
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.adapter or self.engine.model.name

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.engine.model.tokenizer, "chat_template", None))

    def clear(self) -> None:
        self.messages = list(self.start)

    def use(self, name: str) -> None:
        names = self.engine.adapters.names
        if name not in (*names, "base"):
            typer.echo(f"{name or '/use'} is none of: base {' '.join(names)}")
            return
        self.adapter = None if name == "base" else name
        typer.echo(f"{self.name} answers now")

    def retry(self) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            typer.echo("there is nothing to answer again")
            return
        self._answer()

    def say(self, text: str) -> None:
        if not self.has_template:
            text = text.replace("\\n", "\n")  # a line break, which input() cannot take
        self.messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        """Stream an answer; Ctrl-C ends it, and what was written stays in the conversation."""
        from headrace.errors import ConfigError

        parts: list[str] = []
        try:
            ids = self._prompt_ids()
            room = max(1, self.engine.max_model_len - len(ids))
            params = replace(self.params, max_tokens=min(self.params.max_tokens or room, room))
            for delta in self.engine.stream(ids, params, adapter=self.adapter):
                parts.append(delta.text)
                typer.echo(delta.text, nl=False)
            typer.echo()
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except ConfigError as error:  # too long by now, or refused by the template
            typer.echo(f"{error}\n/clear starts over")
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _prompt_ids(self) -> list[int]:
        """The conversation through the chat template, or as plain text without one."""
        if not self.has_template:
            return self.engine.encode("".join(m["content"] for m in self.messages))
        found = self.engine.model.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(found["input_ids"])
