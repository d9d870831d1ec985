"""Serving side by side: Headrace and `transformers serve` with continuous batching, same model.

    python benchmarks/serve.py --out out/bench-serve                 # about ten minutes on 2 cores
    python benchmarks/serve.py --sizes 512,1408,8,8,4 --streams 16 --rounds 3

Makes a Llama of random float32 weights (28M parameters by default) without an end token, starts one
server after the other on this machine and sends both the same load with the same client: greedy,
fixed lengths, warm-up apart. Rounds are interleaved. Then the engine alone: time of a step in which
all sequences decode against the bound that memory bandwidth sets (weights + keys and values read
once), host time a step, and the cost of adapters in the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "examples" / "reminders" / "base"


def make_model(folder: Path, sizes: tuple[int, ...]) -> None:
    """A Llama with random weights and the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads, kv_heads = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, float32")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server process, started and waited for; `seconds` until it was ready."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        import httpx

        self.url = f"http://127.0.0.1:{port}"
        start = time.perf_counter()
        self._log = log.open("w")
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=env)
        while True:
            if self._process.poll() is not None:
                sys.exit(f"{command[0]} ended early; see {log}")
            try:
                if httpx.get(self.url + "/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.3)
        self.seconds = time.perf_counter() - start

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def start(kind: str, model: Path, args: argparse.Namespace, out: Path) -> Server:
    port = free_port()
    scripts = Path(sys.executable).parent
    if kind == "headrace":
        command = [str(scripts / "headrace"), "serve", str(model), "--port", str(port)]
        command += ["--max-num-seqs", str(args.streams), "--max-model-len", str(args.context)]
    else:
        command = [
            args.peer or str(scripts / "transformers"),
            "serve",
            str(model),
            "--device",
            "cpu",
        ]
        command += ["--port", str(port), "--continuous-batching", "--dtype", "float32"]
        blocks = args.streams * args.context // 256 + 8
        command += ["--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "512"]
    return Server(command, port, out / f"{kind}.log")


def load(kind: str, url: str, model: Path, args: argparse.Namespace, seed: int) -> Any:
    """One round: the same chat requests to either server."""
    from headrace.serve.bench import Load, measure

    return asyncio.run(
        measure(
            Load(
                url=url,
                model=None if kind == "headrace" else str(model),
                num_requests=args.requests,
                concurrency=args.streams,
                input_tokens=args.input,
                output_tokens=args.output,
                chat=True,
                seed=seed,
                extra={},
            )
        )
    )


def side_by_side(model: Path, args: argparse.Namespace, out: Path) -> dict[str, list[Any]]:
    kinds = ["headrace", "transformers"] if not args.no_peer else ["headrace"]
    found: dict[str, list[Any]] = {k: [] for k in kinds}
    for i in range(args.rounds):
        for kind in kinds:
            server = start(kind, model, args, out)
            try:
                report = load(kind, server.url, model, args, seed=100 + i)
            finally:
                server.stop()
            found[kind].append(report)
            print(
                f"round {i + 1} {kind:<13} {report.output_throughput:8.1f} output tokens/s  "
                f"ttft p50 {report.times['ttft'].get('p50', 0):8.1f} ms  "
                f"first text {report.times['first_text'].get('p50', 0):8.1f} ms  "
                f"tpot p50 {report.times['tpot'].get('p50', 0):7.2f} ms  "
                f"{report.completed} done, {report.failed} failed  ready in {server.seconds:.1f} s"
                + (f"  {report.first_error}" if report.first_error else ""),
                flush=True,
            )
    return found


def bandwidth() -> float:
    """Bytes a second of reading 256 MB arrays through a compiled sum, the best of ten."""
    import jax
    import jax.numpy as jnp

    arrays = [jnp.ones(64 * 1024 * 1024, jnp.float32) * i for i in range(2)]
    total = jax.jit(lambda xs: sum(x.sum() for x in xs))
    jax.block_until_ready(total(arrays))
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(total(arrays))
        best = max(best, sum(x.nbytes for x in arrays) / (time.perf_counter() - begin))
    return best


def engine_alone(model: Path, args: argparse.Namespace, adapters: int) -> dict[str, float]:
    """Decode steps of `streams` sequences in process: milliseconds, share of the bound."""
    from headrace.serve import Engine, EngineOptions, SamplingParams

    options = EngineOptions(
        max_model_len=args.context, max_num_seqs=args.streams, max_loras=adapters, max_lora_rank=16
    )
    with Engine(str(model), options=options) as engine:
        names: list[str | None] = [None]
        if adapters:
            folders = [
                _random_adapter(model, model.parent / f"adapter{i}", i) for i in range(adapters)
            ]
            for i, folder in enumerate(folders):
                engine.load_adapter(f"a{i}", folder)
            names = [f"a{i}" for i in range(adapters)]
        params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
        best: dict[str, float] = {}
        for repeat in range(args.rounds + 1):
            steps, host, wait = _decode(engine, args, params, names, repeat)
            host, wait = host / steps * 1e3, wait / steps * 1e3
            if repeat and (not best or host + wait < best["step_ms"]):
                best = {"step_ms": host + wait, "host_ms": host}
        weights = engine.model.num_bytes
        cache = sum(
            e.shape(num_pages=1, page_size=1, kv_cache_dtype="auto").bytes_a_token
            for e in engine.model.entries.values()
            if e.writes
        )
        read = weights + cache * args.streams * (args.input + args.output / 2)
        best["bytes_a_step"] = read
        best["late_compilations"] = engine.late_compilations
    return best


def _decode(
    engine: Any, args: argparse.Namespace, params: Any, names: Any, repeat: int
) -> tuple[float, float, float]:
    """Number of steps in which all sequences decode, their host and their wait seconds."""
    marks: list[tuple[float, float, float]] = []
    begun: set[int] = set()
    left = threading.Semaphore(0)

    def mark() -> None:
        stats = engine.stats
        marks.append((stats.steps, stats.host_seconds, stats.wait_seconds))

    def listen(i: int, delta: Any) -> None:  # in the engine's thread, within a turn
        if i not in begun:
            begun.add(i)
            if len(begun) == args.streams:
                mark()
        if delta.finish_reason is not None:
            if len(marks) == 1:
                mark()
            left.release()

    for i in range(args.streams):
        prompt = [10 + (i * 131 + repeat * 17 + j) % 8000 for j in range(args.input)]
        engine.submit(prompt, params, partial(listen, i), adapter=names[i % len(names)])
    for _ in range(args.streams):
        left.acquire()
    before, after = marks
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _random_adapter(model: Path, folder: Path, seed: int) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(str(model))
    tuned = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    tuned.save_pretrained(str(folder))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-serve"))
    parser.add_argument("--sizes", default="512,1408,8,8,4", help="hidden,inner,layers,heads,kv")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=int, default=64, help="prompt words or tokens")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--peer", help="transformers command of an environment with [serving]")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers serve out")
    parser.add_argument("--no-servers", action="store_true", help="the engine alone")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    make_model(model, tuple(int(x) for x in args.sizes.split(",")))
    result: dict[str, Any] = {}
    if not args.no_servers:
        found = side_by_side(model.resolve(), args, args.out)
        medians = {
            kind: (
                statistics.median(r.output_throughput for r in reports),
                statistics.median(r.times["first_text"].get("p50", float("nan")) for r in reports),
            )
            for kind, reports in found.items()
        }
        for kind, (rate, ttft) in medians.items():
            print(f"{kind:<13} median: {rate:.1f} output tokens/s, first text p50 {ttft:.1f} ms")
        if "transformers" in medians:
            (a, x), (b, y) = medians["headrace"], medians["transformers"]
            print(f"output tokens/s: {a / b:.2f} times the peer's; first text: {x / y:.2f} of it")
        result["servers"] = {k: [json.loads(r.as_json()) for r in v] for k, v in found.items()}
    rate = bandwidth()
    print(f"memory bandwidth: {rate / 1e9:.1f} GB/s (compiled sum)")
    result["bandwidth"] = rate
    for adapters in [0, args.adapters] if args.adapters else [0]:
        one = engine_alone(model, args, adapters)
        bound = one["bytes_a_step"] / rate * 1e3
        print(
            f"engine, {args.streams} sequences, {adapters} adapters: step {one['step_ms']:.2f} ms, "
            f"bandwidth bound {bound:.2f} ms ({bound / one['step_ms']:.0%} of it), host "
            f"{one['host_ms']:.2f} ms, compiled late {one['late_compilations']}"
        )
        result[f"engine_{adapters}_adapters"] = {**one, "bound_ms": bound}
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
