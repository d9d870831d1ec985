"""Load on any OpenAI-style server, and what its answers took.

Definitions are those of `vllm bench serve`: TTFT is from sending to the first chunk with a choice
(which some servers send empty at once: first_text is the time to one with text), ITL the gap
between chunks, TPOT (end - first chunk) / (output tokens - 1), tokens as the server's usage counts
them, goodput the requests that meet every limit given. Warm-up requests are sent before and not
counted. Times are seconds, rates are per second of wall time.

Knows: HTTP, clocks. Does not know: which engine answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import ConfigError, ServeError

PERCENTILES = (50, 90, 99)
WORDS = "time year people way day man thing woman life child world school state family hand part"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent. concurrency: open requests at most; request_rate: arrivals a second (Poisson),
    infinite sends at once. input_tokens: length of the random prompts, in token ids (or words for
    servers that take no ids). extra: further fields of the request body.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    num_requests: int = 100
    concurrency: int = 16
    request_rate: float = float("inf")
    input_tokens: int = 64
    output_tokens: int = 64
    vocab_size: int = 1000
    as_text: bool = False
    num_warmups: int = 2
    seed: int = 0
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})


@dataclass(kw_only=True)
class Measured:
    """One request. error is empty when it was answered."""

    sent: float = 0.0
    ttft: float = 0.0
    first_text: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.end - self.sent - self.ttft) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What a load took. times: name -> {mean, p50, p90, p99} in milliseconds."""

    load: dict[str, Any]
    seconds: float
    completed: int
    failed: int
    first_error: str
    input_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    times: dict[str, dict[str, float]]
    cost_per_million_output_tokens: float | None

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=1)


async def measure(
    load: Load, *, goodput: Mapping[str, float] | None = None, price_per_hour: float | None = None
) -> BenchReport:
    """Send the load and sum up.

    goodput: limits in milliseconds for ttft, tpot, e2el. price_per_hour: of all chips together.
    Raises ConfigError for limits that do not exist, ServeError when the server cannot be reached.
    """
    import httpx

    unknown = set(goodput or {}) - {"ttft", "tpot", "e2el"}
    if unknown:
        raise ConfigError(f"goodput knows ttft, tpot and e2el, not {', '.join(sorted(unknown))}")
    rng = random.Random(load.seed)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = load.url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=600, limits=limits
    ) as client:
        model = load.model or await _first_model(client)
        for _ in range(load.num_warmups):
            await _one(client, load, model, rng)
        start = time.perf_counter()
        results = await _send_all(client, load, model, rng)
        seconds = time.perf_counter() - start
    return _report(load, results, seconds, goodput, price_per_hour)


async def _first_model(client: Any) -> str:
    import httpx

    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ServeError(
            f"{client.base_url} did not list its models ({type(error).__name__}); is a server "
            "running there? Name the model to go without the list"
        ) from error


async def _send_all(client: Any, load: Load, model: str, rng: random.Random) -> list[Measured]:
    room = asyncio.Semaphore(load.concurrency)

    async def send() -> Measured:
        async with room:
            return await _one(client, load, model, rng)

    tasks: list[asyncio.Task[Measured]] = []
    for _ in range(load.num_requests):
        tasks.append(asyncio.create_task(send()))
        if load.request_rate != float("inf"):
            await asyncio.sleep(rng.expovariate(load.request_rate))
    return list(await asyncio.gather(*tasks))


def _prompt(load: Load, rng: random.Random) -> Any:
    if load.as_text or load.chat:
        return " ".join(rng.choices(WORDS.split(), k=load.input_tokens))
    return [rng.randrange(10, load.vocab_size) for _ in range(load.input_tokens)]


async def _one(client: Any, load: Load, model: str, rng: random.Random) -> Measured:
    import httpx

    prompt = _prompt(load, rng)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": load.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.extra,
    }
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    found = Measured(sent=time.perf_counter())
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                found.error = f"HTTP {answer.status_code}: {text[:200]}"
                return found
            await _read(answer, found)
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


async def _read(answer: Any, found: Measured) -> None:
    last = found.sent
    chunks = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            continue
        data = json.loads(line.removeprefix("data:"))
        if "error" in data:
            found.error = str(data["error"])[:200]
            return
        usage = data.get("usage")
        if usage:
            found.prompt_tokens = usage["prompt_tokens"]
            found.output_tokens = usage["completion_tokens"]
        if not data.get("choices"):
            continue
        now = time.perf_counter()
        if not found.ttft:
            found.ttft = now - found.sent
        else:
            found.gaps.append(now - last)
        if not found.first_text and _has_text(data["choices"][0]):
            found.first_text = now - found.sent
        last, chunks = now, chunks + 1
    found.end = last
    found.output_tokens = found.output_tokens or chunks
    if not chunks:
        found.error = "the stream had no chunk with a choice"


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk brings something to read; some servers send an empty one at once."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _report(
    load: Load,
    results: Sequence[Measured],
    seconds: float,
    goodput: Mapping[str, float] | None,
    price_per_hour: float | None,
) -> BenchReport:
    done = [r for r in results if not r.error]
    failed = [r for r in results if r.error]
    output = sum(r.output_tokens for r in done)
    prompts = sum(r.prompt_tokens for r in done)
    times = {
        "ttft": _summary([r.ttft for r in done]),
        "first_text": _summary([r.first_text for r in done if r.first_text]),
        "tpot": _summary([r.tpot for r in done if r.output_tokens > 1]),
        "itl": _summary([gap for r in done for gap in r.gaps]),
        "e2el": _summary([r.end - r.sent for r in done]),
    }
    good = None
    if goodput:
        good = sum(_is_good(r, goodput) for r in done) / seconds
    cost = None
    if price_per_hour is not None and output:
        cost = price_per_hour / 3600 * seconds / output * 1e6
    settings = asdict(load)
    settings["api_key"] = None
    settings["request_rate"] = str(load.request_rate)
    return BenchReport(
        load=settings,
        seconds=seconds,
        completed=len(done),
        failed=len(failed),
        first_error=failed[0].error if failed else "",
        input_tokens=prompts,
        output_tokens=output,
        request_throughput=len(done) / seconds,
        output_throughput=output / seconds,
        total_throughput=(output + prompts) / seconds,
        goodput=good,
        times=times,
        cost_per_million_output_tokens=cost,
    )


def _is_good(r: Measured, limits: Mapping[str, float]) -> bool:
    took = {"ttft": r.ttft, "tpot": r.tpot, "e2el": r.end - r.sent}
    return all(took[name] * 1000 <= limit for name, limit in limits.items())


def _summary(values: list[float]) -> dict[str, float]:
    import numpy as np

    if not values:
        return {}
    found = {"mean": float(np.mean(values)) * 1000}
    ranks = np.percentile(values, PERCENTILES)
    return found | {f"p{p}": float(v) * 1000 for p, v in zip(PERCENTILES, ranks, strict=True)}


def save_picture(reports: Sequence[BenchReport], path: str) -> None:
    """Throughput and latency over concurrency (or request rate) as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    open_loop = len({r.load["request_rate"] for r in reports}) > 1
    name = "request_rate" if open_loop else "concurrency"
    x = [float(r.load[name]) for r in reports]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(x, [r.output_throughput for r in reports], marker="o")
    left.set(xlabel=name.replace("_", " "), ylabel="output tokens/s", ylim=(0, None))
    for kind in ("ttft", "tpot"):
        for rank in ("p50", "p99"):
            y = [r.times[kind].get(rank, float("nan")) for r in reports]
            right.plot(x, y, marker="o", label=f"{kind} {rank}")
    right.set(xlabel=name.replace("_", " "), ylabel="milliseconds", yscale="log")
    right.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
