"""How fast a file becomes packed rows, stage by stage, and how full the rows are.

    python benchmarks/data_rate.py FILE TOKENIZER_FOLDER [--repeat 20] [--row_length 2048] [--chat]

Prints seconds of wall and CPU time and tokens per second of each, and of the whole pipeline as a
run has it: file to batches, pieces prepared in a thread (goal: 50,000 tokens/s of a host with 2
cores, so that a device never waits for data). --chat sets a ChatML template.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from headrace.config import SFTConfig
from headrace.data.dataset import causal_dataset
from headrace.data.formats import detect_causal
from headrace.data.growing import PieceLoader, growing_dataset
from headrace.data.loader import Loader, LoaderState
from headrace.data.packing import pack
from headrace.data.policy import LengthPolicy, apply_policy
from headrace.data.prepare import tokenize_causal
from headrace.data.read import from_python, read_table

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result with wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def whole_pipeline(rows: list[Any], config: SFTConfig, tokenizer: Any) -> int:
    """Tokens of one epoch, from a file to batches, prepared while they are taken."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        streamed = config.replace(dataset_name=file.name, dataset_streaming=True, max_steps=1)
        data = growing_dataset(streamed, tokenizer)
        loader = PieceLoader(rows=data.growing, batch_size=8)
        return sum(step.num_tokens for step in loader.epoch(LoaderState()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("tokenizer")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--row_length", type=int, default=2048)
    parser.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
    tokenizer.chat_template = CHATML if args.chat else None
    config = SFTConfig(max_length=args.row_length)

    once = read_table(args.file)
    table = from_python(list(once.rows) * args.repeat)
    form = detect_causal(table)
    tokenize_causal(once, form, tokenizer)  # warm: threads and templates
    policy = LengthPolicy(max_length=args.row_length)
    (rows, _), *tokenise = timed(lambda: tokenize_causal(table, form, tokenizer))
    (examples, _), *cut = timed(lambda: apply_policy(rows, policy, table=table))
    packed, *packing = timed(lambda: pack(examples.lengths, row_length=args.row_length))
    loader = Loader(rows=causal_dataset(table, config, tokenizer).rows, batch_size=8)
    _, *batches = timed(lambda: sum(s.num_tokens for s in loader.epoch(LoaderState())))

    total, *pipeline = timed(lambda: whole_pipeline(list(table.rows), config, tokenizer))
    assert total == examples.num_tokens

    title = f"{len(table):,} rows, {examples.num_tokens:,} tokens, {form}"
    grid = Table("stage", "wall s", "CPU s", "tokens / wall s", "tokens / CPU s", title=title)
    for name, (wall, cpu) in {
        "render, tokenise, mask": tokenise,
        "length policy": cut,
        "pack": packing,
        "build batches": batches,
        "file to batches, in pieces": pipeline,
    }.items():
        rates = (f"{examples.num_tokens / seconds:,.0f}" for seconds in (wall, cpu))
        grid.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", *rates)
    console = Console(width=100)
    console.print(grid)
    single = causal_dataset(once, config, tokenizer).rows.packing
    for label, result in (("the file once", single), (f"{args.repeat} times", packed)):
        console.print(f"{label}: {len(result):,} rows, {result.efficiency:.1%} used")


if __name__ == "__main__":
    main()
