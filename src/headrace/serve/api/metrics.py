"""What Prometheus reads: vLLM's names, so that its dashboards and gateways work unchanged.

Knows: prometheus-client, the engine's counters. Does not know: requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.serve.engine import Engine
from headrace.serve.pooling import PoolingEngine

_SMALL = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
TTFT = (*_SMALL, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_MEDIUM = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
ITL = (*_MEDIUM, 10.0, 20.0, 40.0, 80.0)
_LARGE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY = (*_LARGE, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "time_to_first_token": ("time_to_first_token_seconds", "Arrival to first token.", TTFT),
    "inter_token_latency": ("inter_token_latency_seconds", "Between two tokens.", ITL),
    "request_time_per_output_token": (
        "request_time_per_output_token_seconds",
        "Mean time a token after the first, by request.",
        ITL,
    ),
    "e2e_request_latency": ("e2e_request_latency_seconds", "Arrival to end.", LATENCY),
    "request_queue_time": ("request_queue_time_seconds", "Arrival to first step.", LATENCY),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens a request.", TOKENS),
    "request_generation_tokens": ("request_generation_tokens", "Tokens written.", TOKENS),
    "iteration_tokens": ("iteration_tokens_total", "Tokens computed a step.", TOKENS),
}


class Metrics:
    """The registry of one server; `text()` is the page."""

    def __init__(self, engine: Engine | PoolingEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}
        names = tuple(labels)
        self._histograms = {
            key: Histogram(
                f"vllm:{name}", text, names, buckets=buckets, registry=self._registry
            ).labels(**labels)
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests.",
            (*names, "finished_reason"),
            registry=self._registry,
        )
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            (*names, "reason"),
            registry=self._registry,
        ).labels(**labels, reason="queue_full")
        self._labels = labels
        self._registry.register(_EngineCollector(engine, labels))
        engine.stats.observers.append(self._observe)

    def _observe(self, name: str, value: float) -> None:
        if name.startswith("finished:"):
            reason = name.removeprefix("finished:")
            self._finished.labels(**self._labels, finished_reason=reason).inc()
        elif name in self._histograms:
            self._histograms[name].observe(value)

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Gauges and counters that are read from the engine when asked."""

    def __init__(self, engine: Engine | PoolingEngine, labels: dict[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Any]:
        engine = self._engine
        yield self._gauge("num_requests_running", "Sequences being computed.", engine.num_running)
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", engine.num_waiting)
        yield self._counter(
            "prompt_tokens", "Prompt tokens computed or reused.", engine.stats.prompt_tokens
        )
        late = CounterMetricFamily(
            "headrace:late_compilations", "Programs compiled after warm-up.", labels=["engine"]
        )
        late.add_metric(["0"], engine.late_compilations)
        yield late
        if isinstance(engine, Engine):
            yield from self._generation(engine)

    def _generation(self, engine: Engine) -> Iterator[Any]:
        stats, pool = engine.stats, engine.page_pool
        yield self._gauge(
            "kv_cache_usage_perc", "Share of cache pages in use, 0 to 1.", engine.cache_usage
        )
        counters = {
            "prompt_tokens_cached": ("Prompt tokens reused.", stats.cached_tokens),
            "generation_tokens": ("Tokens written.", stats.generation_tokens),
            "num_preemptions": ("Sequences that gave their pages back.", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up.", pool.queries),
            "prefix_cache_hits": ("Prompt tokens found.", pool.hits),
            "spec_decode_num_draft_tokens": ("Guessed tokens.", stats.drafted),
            "spec_decode_num_accepted_tokens": ("Guesses kept.", stats.accepted),
        }
        for name, (text, value) in counters.items():
            yield self._counter(name, text, value)
        yield self._lora(engine)
        yield self._cache_config(engine)

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _lora(self, engine: Engine) -> GaugeMetricFamily:
        adapters = engine.adapters
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Loaded adapters.", labels=labels)
        family.add_metric([str(adapters.max_loras), ",".join(adapters.in_use), ""], 1)
        return family

    def _cache_config(self, engine: Engine) -> GaugeMetricFamily:
        shapes = engine.shapes
        labels = ["block_size", "num_gpu_blocks", "enable_prefix_caching"]
        family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the cache.", labels=labels)
        caching = str(engine.options.prefix_caching)
        family.add_metric([str(shapes.page_size), str(shapes.num_pages - 1), caching], 1)
        return family
