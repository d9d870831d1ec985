"""`headrace chat MODEL`: a conversation on the terminal.

Knows: words, the terminal. Does not know: how answers are made (`headrace.serve`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli import engine as shared


def chat(
    model: Annotated[str, shared.MODEL],
    adapter: Annotated[list[str] | None, shared.ADAPTER] = None,
    use: Annotated[
        str | None,
        typer.Option("--use", help="Adapter that answers.", show_default="the one given"),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0: most likely.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeats an answer.")] = None,
    max_model_len: Annotated[int | None, shared.MAX_MODEL_LEN] = None,
    merge: Annotated[bool, shared.MERGE] = False,
    base: Annotated[str | None, shared.BASE] = None,
    dtype: Annotated[str, shared.DTYPE] = "auto",
    trust_remote_code: Annotated[bool, shared.TRUST] = False,
) -> None:
    """Talk with a model: headrace chat out/my-run

    An empty line or Ctrl-D ends it, /clear forgets the conversation. A model without a chat
    template continues the text of the conversation as it is.
    """
    from headrace.serve import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    options = {
        "max_model_len": max_model_len,
        "max_num_seqs": 1,
        "merge": merge,
        "base": base,
        "dtype": dtype,
        "warm_up": False,
        "compilation_cache": shared.default_compilation_cache(),
        "trust_remote_code": trust_remote_code,
    }
    with shared.start_engine(model, shared.read_adapters(adapter), options, quiet=True) as engine:
        names = engine.adapters.names
        chosen = use or (names[0] if len(names) == 1 else None)
        typer.echo(f"{chosen or engine.model.name}: an empty line ends, /clear starts over")
        start = [{"role": "system", "content": system}] if system else []
        messages = list(start)
        while True:
            try:
                text = input("> ")
            except EOFError:
                typer.echo()
                return
            if not text.strip():
                return
            if text.strip() == "/clear":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            for delta in engine.stream(_prompt(engine, messages), params, adapter=chosen):
                answer += delta.text
                typer.echo(delta.text, nl=False)
            typer.echo()
            messages.append({"role": "assistant", "content": answer})


def _prompt(engine: object, messages: list[dict[str, str]]) -> str | list[int]:
    """The conversation as token ids, or as plain text without a template."""
    from headrace.serve import Engine

    assert isinstance(engine, Engine)
    tokenizer = engine.model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return "".join(m["content"] for m in messages)
    found = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(found["input_ids"])
