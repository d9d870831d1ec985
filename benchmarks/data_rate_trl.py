"""Tokenise and pack: Headrace and TRL on the same rows, in turns, in one process.

    python benchmarks/data_rate_trl.py FILE TOKENIZER_FOLDER [--repeat 10] [--rounds 3]

TRL (pip install trl, or PYTHONPATH to it) prepares data in the constructor of SFTTrainer: its time
is that of a trainer with all rows less that of one with four. FILE: rows of prompt and completion
or Alpaca columns, turned into prompt and completion for both. Prints seconds of wall time,
tokens per second and how full the packed rows are; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headrace.config import SFTConfig
from headrace.data import load_data
from headrace.data.read import read_table


def pairs(path: str, repeat: int) -> list[dict[str, str]]:
    """Prompt and completion of every row, several times with a number that makes them differ."""
    rows = []
    for number in range(repeat):
        for row in read_table(path).rows:
            asked = row.get("prompt") or f"{row['instruction']}\n{row.get('input') or ''}\n"
            answer = row.get("completion") or row["output"]
            if answer:
                rows.append({"prompt": f"{number}: {asked}", "completion": answer})
    return rows


def headrace_seconds(rows: Any, tokenizer: Any, length: int) -> tuple[float, int, float]:
    config = SFTConfig(max_length=length, data_cache_dir=None)
    start = time.perf_counter()
    data = load_data(config, tokenizer, train_dataset=rows).train
    seconds = time.perf_counter() - start
    return seconds, data.report.tokens_after, data.rows.packing.efficiency


def trl_seconds(rows: Any, tokenizer: Any, length: int, model: Any) -> tuple[float, int, float]:
    import trl
    from datasets import Dataset, disable_caching, disable_progress_bars

    disable_caching()
    disable_progress_bars()

    def build(chosen: Any) -> tuple[float, Any]:
        dataset = Dataset.from_list(chosen)
        args = trl.SFTConfig(
            output_dir=tempfile.mkdtemp(), packing=True, max_length=length, report_to="none",
            bf16=False, use_cpu=True, dataset_num_proc=None,
        )  # fmt: skip
        start = time.perf_counter()
        trainer = trl.SFTTrainer(
            model=model, args=args, train_dataset=dataset, processing_class=tokenizer
        )
        return time.perf_counter() - start, trainer.train_dataset

    empty, _ = build(rows[:4])
    whole, packed = build(rows)
    tokens = sum(len(ids) for ids in packed["input_ids"])
    return whole - empty, tokens, tokens / (len(packed) * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_length", type=int, default=2048)
    args = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = pairs(str(args.file), args.repeat)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, max_position_embeddings=args.max_length,
        )
    )  # fmt: skip
    found: dict[str, list[tuple[float, int, float]]] = {"headrace": [], "trl": []}
    for _ in range(args.rounds):
        found["headrace"].append(headrace_seconds(rows, tokenizer, args.max_length))
        found["trl"].append(trl_seconds(rows, tokenizer, args.max_length, model))
    table = Table("", "seconds (median)", "tokens", "tokens/s", "rows used")
    rates: dict[str, float] = {}
    for name, results in found.items():
        seconds = statistics.median(seconds for seconds, _, _ in results)
        _, tokens, used = results[0]
        rates[name] = tokens / seconds
        table.add_row(name, f"{seconds:.2f}", f"{tokens:,}", f"{rates[name]:,.0f}", f"{used:.1%}")
    Console().print(table)
    print(f"{len(rows):,} rows; Headrace/TRL = {rates['headrace'] / rates['trl']:.2f}")


if __name__ == "__main__":
    main()
