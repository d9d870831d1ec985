"""A server process from start to end, an engine that dies, the bench and the parity check."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import tiny_llama
from test_server import _Running
from transformers import LlamaConfig

from headrace.cli.serve import _planned_sizes
from headrace.errors import ConfigError, ServeError
from headrace.serve import Engine, EngineOptions, SamplingParams, capture_for_serving
from headrace.serve.api import ServerOptions, run_server
from headrace.serve.bench import Load, measure
from headrace.serve.vllm import check_parity, prepare

SERVE = "from headrace.cli import main; main(['serve', *__import__('sys').argv[1:]])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama().save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return path


def test_sigterm_refuses_new_requests_and_lets_running_ones_finish(
    folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVE, str(folder), "--port", "0", "--max-num-seqs", "1"]
    command += ["--max-num-batched-tokens", "16", "--max-model-len", "200"]
    command += ["--compilation-cache", str(tmp_path / "cache")]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    with process:
        assert process.stdout is not None
        line = ""
        while not line.startswith("ready on"):
            line = process.stdout.readline()
            assert line, "the server ended early"
        url = line.split()[2]
        body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
        chunks = 0
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            for text in answer.iter_lines():
                if not text.startswith("data: {"):
                    continue
                chunks += 1
                if chunks == 1:
                    process.send_signal(signal.SIGTERM)
                if chunks == 5:
                    refused = httpx.post(url + "/v1/completions", json=body)
                    assert refused.status_code == 503
                    assert httpx.get(url + "/ready").status_code == 503
        assert chunks >= 100, "the answer was cut off"
        assert process.wait(60) == 0
    assert "Traceback" not in log.read_text()
    assert list((tmp_path / "cache").iterdir())


def test_a_second_signal_ends_at_once(engine: Engine) -> None:
    running = _Running(engine, ServerOptions(drain_seconds=60))
    body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
    text = ""
    with (
        httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as answer,
        contextlib.suppress(httpx.RemoteProtocolError),
    ):
        for i, part in enumerate(answer.iter_text()):
            text += part
            if i == 0:  # the engine pauses, so that the answer cannot end by itself
                engine._inbox.put((lambda: time.sleep(1.5), Future()))
                running.server.handle_exit(signal.SIGTERM, None)
                running.server.handle_exit(signal.SIGTERM, None)
    running.thread.join(10)
    assert not running.thread.is_alive()
    assert "[DONE]" not in text
    end = time.monotonic() + 10
    while engine.page_pool.num_used and time.monotonic() < end:
        time.sleep(0.05)
    engine.check_invariants()
    assert engine.page_pool.num_used == 0


def test_an_engine_that_dies_says_so_and_ends_every_request(llama: Any, tokenizer: Any) -> None:
    served = capture_for_serving(llama, tokenizer=tokenizer, name="tiny")
    options = EngineOptions(max_model_len=64, max_num_seqs=1, max_batched_tokens=16, warm_up=False)
    engine = Engine(served, options=options)
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    codes: list[int] = []

    def serve() -> None:
        codes.append(run_server(engine, ServerOptions(port=0), on_start=addresses.put))

    serving = threading.Thread(target=serve)
    serving.start()
    url = addresses.get(timeout=60)
    scheduler: Any = engine._runner.scheduler

    def fail() -> None:
        raise RuntimeError("a device error")

    answers: list[httpx.Response] = []
    body = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True}

    def ask() -> None:
        answers.append(httpx.post(url + "/v1/completions", json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    while not engine.stats.steps:
        time.sleep(0.01)
    scheduler.plan = fail
    asking.join()
    assert answers[0].status_code in (500, 503)
    assert "device error" not in answers[0].text
    assert httpx.get(url + "/health").status_code == 503
    assert isinstance(engine.dead, RuntimeError)
    with pytest.raises(ServeError):
        engine.generate(["Hello"], SamplingParams())
    serving.join(20)
    assert codes == [1]


def test_bench_counts_what_the_server_counts(engine: Engine) -> None:
    running = _Running(engine, ServerOptions())
    try:
        load = Load(url=running.url, num_requests=6, concurrency=3, input_tokens=5, output_tokens=7)
        report = asyncio.run(measure(load, goodput={"ttft": 60_000.0}, price_per_hour=3.6))
        assert (report.completed, report.failed) == (6, 0)
        assert (report.input_tokens, report.output_tokens) == (30, 42)
        assert report.output_throughput == pytest.approx(42 / report.seconds)
        assert report.goodput == pytest.approx(6 / report.seconds)
        assert report.cost_per_million_output_tokens == pytest.approx(
            0.001 * report.seconds / 42 * 1e6
        )
        times = report.times
        assert times["e2el"]["p50"] >= times["first_text"]["p50"] >= times["ttft"]["p50"] > 0
        assert times["tpot"]["p99"] * 6 <= times["e2el"]["p99"] + 1
        json.loads(report.as_json())
        with pytest.raises(ConfigError, match="goodput knows"):
            asyncio.run(measure(load, goodput={"speed": 1.0}))
        with pytest.raises(ServeError, match="is a server running"):
            asyncio.run(measure(Load(url="http://127.0.0.1:9")))
        parity = check_parity(engine, running.url, ["Reminder: call Tom", "one two three"])
        assert parity.largest_difference < 1e-4
        assert parity.num_tokens > 5
        assert parity.greedy_agreement == 1.0
    finally:
        running.stop()


def test_the_vllm_command_fits_the_folder_and_the_slice(folder: Path, tmp_path: Path) -> None:
    sizes = _planned_sizes(str(folder), None, "v6e-4", 128)
    handover = prepare(folder, None, sizes=sizes)
    assert handover.command[:3] == ("vllm", "serve", str(folder.resolve()))
    text = str(handover)
    assert "--tensor-parallel-size 1 --max-model-len 128" in text
    assert "--max-num-seqs 256" in text
    assert "start it 4 times" in text
    with pytest.raises(ConfigError, match="v9-1"):
        _planned_sizes(str(folder), None, "v9-1", None)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["A", "B"]}')
    with pytest.raises(
        ConfigError, match=r"(?s)exactly one class.*no safetensors.*no tokenizer.*do not fit v6e-4"
    ):
        prepare(broken, None, sizes=replace(sizes, fits=False))


def test_a_large_model_is_divided_as_the_planner_says(tmp_path: Path) -> None:
    """A 70B Llama: 141 GB of bfloat16 weights on chips of 32 GiB need all eight of v6e-8."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(str(tmp_path))
    sizes = _planned_sizes(str(tmp_path), None, "v6e-8", None)
    assert (sizes.tensor, sizes.max_model_len, sizes.fits) == (8, 8192, True)
    assert 16 <= sizes.max_num_seqs <= 256
    assert sizes.max_num_batched_tokens == 1024  # 918 Tflop/s over 1.64 TB/s: 560 tokens
    assert 0.85 <= sizes.memory_share <= 0.95
    assert not _planned_sizes(str(tmp_path), None, "v6e-4", None).fits
