"""The server as its clients see it: the official openai package, raw sockets, wrong requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from prometheus_client.parser import text_string_to_metric_families

from headrace.serve import Engine, SamplingParams
from headrace.serve.api import ServerOptions, build_server

PROMPT = "Reminder: call Tom"
MESSAGES: list[Any] = [{"role": "user", "content": "call Tom"}]


class _Running:
    """The real server, on a free port, in a thread."""

    def __init__(self, engine: Any, options: ServerOptions) -> None:
        self.server = build_server(engine, replace(options, port=0))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = self.server.url
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[_Running]:
    running = _Running(engine, ServerOptions(max_body_bytes=100_000))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def impatient(engine: Engine) -> Iterator[_Running]:
    """Apart from the others: a busy machine must not make an honest client a slow one."""
    running = _Running(engine, ServerOptions(head_seconds=1.0, body_seconds=1.0))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: _Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_equals_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    want = engine.generate([PROMPT], params)[0][0]
    got = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=9)
    assert got.choices[0].text == want.text
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 9
    assert got.usage.prompt_tokens == want.num_prompt


def test_streams_join_to_the_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(messages=MESSAGES, **options)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_many_async_streams_at_once(server: _Running, client: openai.OpenAI) -> None:
    prompts = [f"{PROMPT} {i}" for i in range(6)]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 10}

    async def one(many: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await many.completions.create(prompt=prompt, stream=True, **options)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as many:
            return await asyncio.gather(*(one(many, p) for p in prompts))

    answers = asyncio.run(run())
    whole = client.completions.create(prompt=prompts, **options)
    assert answers == [c.text for c in whole.choices]


def test_choices_logprobs_seed_and_stop(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 6, "temperature": 1.0}
    first = client.chat.completions.create(
        messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **options
    )
    again = client.chat.completions.create(messages=MESSAGES, n=2, **options)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert texts[0] != texts[1]
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert b"".join(bytes(e.bytes or []) for e in logprobs.content).decode() == texts[0]
    stop = (texts[0] or "")[2:5]
    short = client.chat.completions.create(messages=MESSAGES, stop=stop, **options)
    assert short.choices[0].message.content == (texts[0] or "").split(stop)[0]
    assert short.choices[0].finish_reason == "stop"


def test_echo_scores_the_prompt_for_evaluators(client: openai.OpenAI, tokenizer: Any) -> None:
    got = client.completions.create(
        model="tiny", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0
    ).choices[0]
    ids = tokenizer(PROMPT)["input_ids"]
    assert got.text.startswith(PROMPT)
    assert got.logprobs is not None
    assert got.logprobs.token_logprobs is not None
    assert got.logprobs.tokens is not None
    assert len(got.logprobs.tokens) == len(ids) + 1
    assert "".join(got.logprobs.tokens) == got.text
    assert got.logprobs.token_logprobs[0] is None
    assert all(x is not None and x < 0 for x in got.logprobs.token_logprobs[1:])


def test_structured_answers_and_forced_tools(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"when": {"enum": ["now", "later"]}},
        "required": ["when"],
        "additionalProperties": False,
    }
    got = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=60,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(got.choices[0].message.content or "")["when"] in ("now", "later")
    tool: Any = {"type": "function", "function": {"name": "set_when", "parameters": schema}}
    called = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=90, seed=1, tools=[tool], tool_choice="required"
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    function: Any = called.message.tool_calls[0]
    assert function.function.name == "set_when"
    assert json.loads(function.function.arguments)["when"] in ("now", "later")


@pytest.mark.parametrize(
    ("path", "body", "code", "words"),
    [
        ("completions", "{", 400, "JSON"),
        ("completions", "[]", 400, "object"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": 5}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": None, "top_p": 7}, 400, "top_p"),
        ("completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
        ("completions", {"prompt": "x", "n": 1000}, 400, "n is 1000"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "word " * 500}, 400, "context is 160"),
        ("completions", {"prompt": [1, -5]}, 400, "token ids"),
        ("completions", {"prompt": "x", "model": "gpt-4"}, 404, "gpt-4"),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "pad": "y" * 200_000}, 413, "larger"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image_url",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "tool_choice": "required"},
            400,
            "tool_choice needs tools",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            400,
            "json_schema",
        ),
        ("nowhere", {}, 404, "nowhere"),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 404, "no adapter"),
        ("unload_lora_adapter", {"lora_name": "a"}, 404, "a"),
    ],
)
def test_wrong_requests_get_openai_errors(
    server: _Running, path: str, body: Any, code: int, words: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)
    assert got.status_code == code
    error = got.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert words in error["message"]
    assert len(error["message"]) <= 1000
    assert not re.search(r"Traceback|File \"|site-packages", got.text)


def test_random_bodies_never_crash_the_server(server: _Running, engine: Engine) -> None:
    """Every field of both requests with values of every JSON type: 2xx or 4xx."""
    import random

    from headrace.serve.api.protocol import ChatRequest, CompletionRequest

    rng = random.Random(0)
    values: list[Any] = [None, True, 0, -1, 3, 1e308, 0.5, "", "x", [], [1], ["a"], {}, {"a": 1}]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for kind, path, start in [
            (CompletionRequest, "/v1/completions", {"prompt": "x"}),
            (ChatRequest, "/v1/chat/completions", {"messages": MESSAGES}),
        ]:
            for _ in range(120):
                body: dict[str, Any] = {**start, "max_tokens": 2}
                for name in rng.sample(sorted(kind.model_fields), 2):
                    body[name.rstrip("_")] = rng.choice(values)
                got = http.post(path, json=body)
                assert got.status_code < 500 or got.status_code == 503, (body, got.text)
    assert engine.alive


def test_a_client_that_leaves_frees_everything(server: _Running, engine: Engine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 140, "ignore_eos": True, "stream": True}
    for stream in (True, False):
        for _ in range(8):
            raw = json.dumps({**body, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
                if stream:
                    connection.recv(200)
    end = time.monotonic() + 30
    while (engine.num_running or engine.num_waiting) and time.monotonic() < end:
        time.sleep(0.05)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.page_pool.num_used == 0
    engine.check_invariants()


def test_overload_answers_or_says_when_to_come_back(server: _Running, engine: Engine) -> None:
    """Ten times what rows and queue hold, at once: what is accepted is answered whole."""
    num = 10 * (engine.options.max_num_seqs + engine.options.max_queue)

    async def one(http: httpx.AsyncClient) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
        return await http.post("/v1/completions", json=body)

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=num)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(one(http) for _ in range(num)))

    got = asyncio.run(run())
    codes = [r.status_code for r in got]
    assert set(codes) == {200, 503}
    assert all(r.headers["retry-after"] == "1" for r in got if r.status_code == 503)
    assert all(r.json()["usage"]["completion_tokens"] == 12 for r in got if r.status_code == 200)
    assert codes.count(200) >= engine.options.max_queue
    assert httpx.get(server.url + "/health").status_code == 200
    assert engine.page_pool.num_used == 0
    engine.check_invariants()


def test_adapters_change_under_load(
    server: _Running, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Loaded again and again while answers run: each answer is of one version, whole."""
    folders = [_adapter(tmp_path_factory.mktemp("adapters") / "swapped", seed) for seed in (1, 2)]
    body = {"model": "swapped", "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
    body["temperature"] = 0
    wanted: set[str] = set()
    with httpx.Client(base_url=server.url, timeout=120) as http:

        def load(i: int) -> bool:
            """False while two older versions still answer: there are two slots."""
            change = {"lora_name": "swapped", "lora_path": str(folders[i % 2])}
            answer = http.post("/v1/load_lora_adapter", json={**change, "load_inplace": True})
            assert answer.status_code == 200 or (
                answer.status_code == 409 and "slots are in use" in answer.text
            )
            return answer.status_code == 200

        def ask() -> str:
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        for i in range(2):
            assert load(i)
            wanted.add(ask())
        assert len(wanted) == 2
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(ask) for _ in range(24)]
            swaps = 0
            while not all(future.done() for future in asked):
                swaps += load(swaps)
                time.sleep(0.01)
            assert swaps > 2
            assert {future.result() for future in asked} == wanted
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "swapped"})
        assert gone.status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 404
    engine.check_invariants()


def _adapter(folder: Path, seed: int) -> Path:
    tuned: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    tuned.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_slow_head_is_cut_off(impatient: _Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.settimeout(60)
        if sent:  # the second request of a connection that was fine
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in connection.recv(300)
        start = time.monotonic()
        closed = False
        with contextlib.suppress(OSError):  # the server may close before all is sent
            for i in range(600):
                connection.sendall(sent[i : i + 1] or b"a" * bool(sent))
                time.sleep(0.05)
                closed = _closed(connection)
                if closed:
                    break
            assert closed
        assert time.monotonic() - start > 0.5


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(60)


def test_a_slow_body_is_cut_off(impatient: _Running) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n"
        connection.sendall(head + b"content-type: application/json\r\n\r\n{")
        connection.settimeout(60)
        assert b" 408 " in connection.recv(300)


def test_keys_guard_everything_but_health(engine: Engine) -> None:
    running = _Running(engine, ServerOptions(api_keys=("secret", "other")))
    try:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=running.url + "/v1", api_key="wrong").models.list()
        right = openai.OpenAI(base_url=running.url + "/v1", api_key="other")
        assert right.models.list().data[0].id == "tiny"
        codes = {
            path: httpx.get(running.url + path).status_code
            for path in ("/", "/health", "/ready", "/metrics", "/v1/models", "/tokenize")
        }
        open_paths = {"/": 200, "/health": 200, "/ready": 200}
        assert codes == {**open_paths, "/metrics": 401, "/v1/models": 401, "/tokenize": 401}
    finally:
        running.stop()


def test_tokens_there_and_back(server: _Running, tokenizer: Any) -> None:
    got = httpx.post(server.url + "/tokenize", json={"prompt": PROMPT}).json()
    assert got["tokens"] == tokenizer(PROMPT)["input_ids"]
    assert got["count"] == len(got["tokens"])
    back = httpx.post(server.url + "/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": PROMPT}


def test_metrics_have_the_names_that_dashboards_read(server: _Running) -> None:
    text = httpx.get(server.url + "/metrics").text
    found = {family.name for family in text_string_to_metric_families(text)}
    names = """num_requests_running num_requests_waiting kv_cache_usage_perc lora_requests_info
        cache_config_info prompt_tokens generation_tokens request_success num_preemptions
        prefix_cache_queries prefix_cache_hits admission_rejections time_to_first_token_seconds
        inter_token_latency_seconds request_time_per_output_token_seconds
        e2e_request_latency_seconds request_queue_time_seconds request_prompt_tokens
        request_generation_tokens iteration_tokens_total"""
    missing = {f"vllm:{n}" for n in names.split()} - found
    assert missing <= {"vllm:iteration_tokens_total"}  # the parser strips a _total of its own
    assert "vllm:iteration_tokens" in " ".join(found)


def test_the_page_loads_nothing_from_elsewhere(server: _Running) -> None:
    page = httpx.get(server.url + "/").text
    assert "Headrace playground" in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
