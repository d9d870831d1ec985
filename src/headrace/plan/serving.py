"""What serving a model on a slice needs, how fast it can answer and what a million tokens cost.

At once the analytic answer, marked so: a decode step reads every weight and all keys and values of
the running sequences once, computes on them, and sums activations over the chips of one replica; a
prompt is matrix products and attention. Then, on TPU slices, the engine's own programs, compiled
and replayed. Engines reach a part of either: `PUBLISHED` and `PUBLISHED_COMPILED` say how much
longer measured servers took, and ranges carry it.

Knows: model shapes, chips, compiled reports. Does not know: programs, requests' arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.analytic import ITEM_BYTES, RATES
from headrace.plan.candidate import ServerCandidate
from headrace.plan.compiler import Say, compile_all
from headrace.plan.hardware import Slice, all_slices, parse_slice
from headrace.plan.prices import Price, read_prices, slice_price
from headrace.plan.shape import LayerKind, ModelShape, model_shape, read_model_config
from headrace.plan.topology import compiler_obstacle

PUBLISHED = (1.15, 2.8)  # measured over modelled time a token, see docs/planning.md
PUBLISHED_COMPILED = (1.1, 2.7)  # measured over replayed, likewise
_SUM_SECONDS = 5e-6  # assumed: least time of one all-reduce between neighbours
_WORKSPACE = 0.08  # assumed: share of the memory for programs, activations, logits
_STREAMS = (1, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Mean tokens of a prompt and of an answer; the longest sequence; streams at once."""

    prompt: int = 1024
    answer: int = 256
    longest: int = 4096
    streams: int = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """One number of streams on one replica. Seconds are modelled bests; tokens a second are of all
    replicas; `first` is the time to a first token without a queue."""

    streams: int
    step: float
    token: float
    first: float
    tokens_per_second: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """tensor: chips that share one copy of the model; replicas: copies on the slice. item: bytes of
    a weight; activation: bytes of an activation, and of a cached number unless kv_cache_dtype is
    int8. report: the compiled one, None when only the analytic model ran; then `why_not` says why.
    """

    shape: ModelShape
    hardware: Slice
    traffic: Traffic
    price: Price
    prices: Mapping[str, Price]
    tensor: int
    item: int
    activation: int
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    quantization: str | None = None
    report: Mapping[str, Any] | None = None
    why_not: str = ""
    cached: bool = False
    changes: tuple[ServingChange, ...] = ()

    @property
    def candidate(self) -> ServerCandidate:
        """One copy, as the compiler is asked about it."""
        traffic = self.traffic
        return ServerCandidate(
            slice_name=self.hardware.name,
            tensor=self.tensor,
            streams=-(-traffic.streams // self.replicas),
            longest=max(traffic.longest, traffic.prompt + traffic.answer),
            prompt=traffic.prompt,
            answer=traffic.answer,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def compiled(self) -> bool:
        return self.report is not None

    @property
    def timed(self) -> bool:
        """Whether times are replays of compiled programs."""
        return self.report is not None and "decode_seconds" in self.report

    @property
    def replicas(self) -> int:
        return self.hardware.num_devices // self.tensor

    @property
    def weights(self) -> int:
        """Bytes of weights on one device."""
        return int(self.shape.size * self.item / self.tensor)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token on one device, nothing dropped by windows."""
        return sum(k.count * self._kv_bytes(k) for k in self.shape.layers)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache of one replica may hold; 0 when the weights leave no room."""
        if self.report is not None:
            return int(self.report.get("cache_tokens_that_fit", 0))
        room = (1 - _WORKSPACE) * self.hardware.chip.hbm_bytes - self.weights
        return max(0, int(room // max(self.token_bytes, 1)))

    @property
    def most_streams(self) -> int:
        """Sequences of mean length that one replica holds at once."""
        return self.cache_tokens // (self.traffic.prompt + self.traffic.answer)

    @property
    def fits(self) -> bool:
        """Whether the longest sequence, and the wanted streams of mean length, have room."""
        if self.report is not None:
            return bool(self.report["fits"])
        wanted = -(-self.traffic.streams // self.replicas)
        return self.cache_tokens >= self.traffic.longest and self.most_streams >= wanted

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of one device. Analytic: the cache takes what is left; compiled: what the engine
        gives it."""
        if self.report is not None:
            return self.report["memory"]
        limit = self.hardware.chip.hbm_bytes
        return {
            "weights": self.weights,
            "keys and values": self.cache_tokens * self.token_bytes,
            "programs and workspace": int(_WORKSPACE * limit),
        }

    def load(self, streams: int) -> Load:
        """The modelled best of one replica with so many streams, prompts among them."""
        traffic, chip = self.traffic, self.hardware.chip
        rates = RATES[chip.name]
        context = traffic.prompt + traffic.answer / 2
        read = sum(k.count * _weights_read(k, streams) for k in self.shape.layers)
        read += self.shape.embedding  # the head
        read = read * self.item / self.tensor
        read += streams * sum(
            k.count * self._kv_bytes(k) * min(context, k.window or context)
            for k in self.shape.layers
        )
        memory = read / (chip.hbm_bandwidth * rates.hbm)
        flops = chip.flops * rates.matmul * (1.0 if self.activation <= 2 else 0.35)
        compute = 2.0 * streams * self._active / self.tensor / flops
        links = self._sums(streams)
        step = max(memory, compute) + links
        prompt = self._prompt_seconds(flops)
        token = step + streams * prompt / traffic.answer
        return Load(
            streams=streams,
            step=step,
            token=token,
            first=prompt + step,
            tokens_per_second=streams / token * self.replicas,
            bound=max(
                {"HBM": memory, "compute": compute, "links": links}.items(), key=lambda x: x[1]
            )[0],
        )

    def compiled_load(self) -> Load:
        """The wanted streams by the replay. While `answer` tokens are written by each stream, the
        prompts that follow them are computed in steps of the engine's size, which give every stream
        a token too."""
        assert self.report is not None
        report, traffic, streams = self.report, self.traffic, self.candidate.streams
        size = report["prompt_tokens_a_step"]
        prompts = streams * traffic.prompt / size
        alone = max(0.0, traffic.answer - prompts)
        seconds = alone * report["decode_seconds"] + prompts * report["prompt_step_seconds"]
        token = seconds / traffic.answer
        return Load(
            streams=streams,
            step=report["decode_seconds"],
            token=token,
            first=-(-traffic.prompt // size) * report["prompt_step_seconds"],
            tokens_per_second=streams / token * self.replicas,
            bound=_bound(report["programs"]["decode step"]["parts"]),
        )

    @property
    def published(self) -> tuple[float, float]:
        """How many times as long measured servers took a token."""
        return PUBLISHED_COMPILED if self.timed else PUBLISHED

    def loads(self) -> list[Load]:
        """Compiled: the wanted streams, none if the compiler refused. Analytic: from one stream to
        what fits."""
        if self.compiled:
            return [self.compiled_load()] if self.timed else []
        most = max(1, self.most_streams)
        sizes = sorted({s for s in _STREAMS if s <= most} | {min(most, _STREAMS[-1])})
        return [self.load(s) for s in sizes]

    def usd_per_million(self, load: Load) -> float | None:
        """Dollars for a million output tokens, at the modelled best."""
        if self.price.on_demand is None:
            return None
        return self.price.on_demand / (load.tokens_per_second * 3600) * 1e6

    def _kv_bytes(self, kind: LayerKind) -> int:
        """Bytes of one token in one layer on one device; heads are copied, never split."""
        if self.kv_cache_dtype == "int8":  # a code a number, a float32 scale a head
            a_head = kind.head_size + 4
        else:
            a_head = kind.head_size * self.activation
        return 2 * a_head * -(-kind.kv_heads // self.tensor)

    @property
    def _active(self) -> float:
        """Parameters that one token is multiplied with."""
        return sum(k.count * k.used for k in self.shape.layers) + self.shape.embedding

    def _sums(self, tokens: int) -> float:
        """Two all-reduces a layer."""
        if self.tensor == 1:
            return 0.0
        share = 2 * (self.tensor - 1) / self.tensor
        moved = tokens * self.shape.hidden * self.activation * share
        chip = self.hardware.chip
        rate = chip.link_bandwidth * self.hardware.usable_links * RATES[chip.name].links
        return 2 * self.shape.num_layers * (_SUM_SECONDS + moved / rate)

    def _prompt_seconds(self, flops: float) -> float:
        traffic, chip = self.traffic, self.hardware.chip
        attention = sum(
            k.count * 4.0 * traffic.prompt * min(traffic.prompt / 2, k.window or traffic.prompt)
            * k.heads * k.head_size
            for k in self.shape.layers
        )  # fmt: skip
        products = 2.0 * traffic.prompt * self._active / flops
        scores = attention / (chip.flops * RATES[chip.name].attention[0])
        read = self.weights / (chip.hbm_bandwidth * RATES[chip.name].hbm)
        return max((products + scores) / self.tensor, read) + self._sums(traffic.prompt)

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, with plain names."""
        low, high = self.published
        report = self.report or {}
        return {
            "slice": self.hardware.name,
            "model": self.shape.name,
            "compiled": self.compiled,
            "not_compiled_because": self.why_not,
            "cached": self.cached,
            "fits": self.fits,
            "refusal": report.get("refusal"),
            "hbm_bytes_available": self.hardware.chip.hbm_bytes,
            "tensor_parallel_size": self.tensor,
            "replicas": self.replicas,
            "hbm_bytes_per_device": dict(self.memory),
            "kv_bytes_per_token_per_device": self.token_bytes,
            "cache_tokens": self.cache_tokens,
            "streams_that_fit": self.most_streams,
            "loads": [
                {
                    "streams": each.streams,
                    "first_token_seconds": each.first,
                    "seconds_per_token": each.token,
                    "seconds_per_token_range": [low * each.token, high * each.token],
                    "tokens_per_second": each.tokens_per_second,
                    "bound": each.bound,
                    "usd_per_million_tokens": self.usd_per_million(each),
                }
                for each in self.loads()
            ],
            "usd_per_hour": self.price.on_demand,
            "decode_seconds": report.get("decode_seconds"),
            "prompt_step_seconds": report.get("prompt_step_seconds"),
            "prompt_tokens_a_step": report.get("prompt_tokens_a_step"),
            "attention": report.get("attention"),
            "engine": report.get("engine"),
            "parts": {name: each["parts"] for name, each in report.get("programs", {}).items()},
            "compile_seconds": report.get("compile_seconds"),
            "program": report.get("program"),
            "notes": report.get("notes", []),
            "changes": [
                {"change": each.text, "fits": each.plan.fits, "compiled": each.plan.compiled}
                for each in self.changes
            ],
        }


@dataclass(frozen=True, kw_only=True)
class ServingChange:
    """A way to make a server fit, and its plan."""

    text: str
    plan: ServingPlan


def make_serving_plan(
    config: TrainConfig,
    slice_name: str,
    *,
    compile: bool = True,
    say: Say = lambda text: None,
    first: Callable[[ServingPlan], None] = lambda plan: None,
    cache: str | Path | None = None,
    keep_text: str | None = None,
    **options: Any,
) -> ServingPlan:
    """`serving_plan`, and then the engine's programs compiled for the slice. Minutes.

    first: called with the analytic plan at once. options: of `serving_plan`. Where nothing can be
    compiled the plan is the analytic one and says why. When it does not fit, `changes` say what
    would, each compiled.
    """
    quick = serving_plan(config, slice_name, **options)
    first(quick)
    why_not = "" if compile else "the analytic model was asked for"
    if compile and not quick.hardware.is_tpu:
        why_not = "GPU programs are not compiled ahead of time"
    why_not = why_not or (compiler_obstacle() or "" if compile else "")
    if why_not:
        return replace(quick, why_not=why_not)
    ask = partial(_compiled, config, say=say, cache=cache, keep_text=keep_text)
    found = ask([quick])[0]
    if found.fits or not found.compiled:
        return found
    changes = _changes(quick)
    plans = ask([each.plan for each in changes])
    checked = (replace(c, plan=p) for c, p in zip(changes, plans, strict=True))
    return replace(found, changes=tuple(sorted(checked, key=lambda c: not c.plan.fits)))


def _compiled(
    config: TrainConfig,
    plans: Sequence[ServingPlan],
    *,
    say: Say,
    cache: str | Path | None,
    keep_text: str | None,
) -> list[ServingPlan]:
    if not plans:
        return []
    answers = compile_all(
        config,
        [plan.candidate for plan in plans],
        model_config=read_model_config(str(config.model_name_or_path), config.model_revision),
        cache=cache,
        say=say,
        keep_text=keep_text,
    )
    return [
        replace(plan, report=each.report, why_not=each.error or "", cached=each.cached)
        for plan, each in zip(plans, answers, strict=True)
    ]


def _changes(plan: ServingPlan) -> list[ServingChange]:
    """Up to three changes after which it fits by the analytic model, the cheapest first."""
    traffic, found = plan.traffic, list[ServingChange]()

    def offer(text: str, changed: ServingPlan) -> None:
        if changed.fits:
            found.append(ServingChange(text=text, plan=changed))

    heads = [kind.heads for kind in plan.shape.layers]
    for size in _tensor_sizes(plan.hardware, heads):
        if size > plan.tensor and plan.quantization is None:
            offer(f"--tensor {size}", replace(plan, tensor=size))
            break
    mean = traffic.prompt + traffic.answer
    if traffic.longest > mean:
        offer(f"--max_length {mean}", replace(plan, traffic=replace(traffic, longest=mean)))
    fewer = replace(traffic, streams=max(1, traffic.streams // 2))
    if fewer != traffic:
        offer(f"--streams {fewer.streams}", replace(plan, traffic=fewer))
    chip = plan.hardware.chip
    for each in all_slices().values():
        if each.chip is chip and each.num_chips > plan.hardware.num_chips:
            size = max(_tensor_sizes(each, heads)) if plan.quantization is None else 1
            price = slice_price(each, plan.prices)
            text = f"--slice {each.name} --tensor {size}"
            offer(text, replace(plan, hardware=each, tensor=size, price=price))
            break
    return found[:3]


def _bound(parts: Mapping[str, Any]) -> str:
    shares: dict[str, float] = {}
    for part in parts.values():
        shares[part["bound"]] = shares.get(part["bound"], 0.0) + part["seconds"]
    return max(shares, key=lambda name: shares[name])


def _tensor_sizes(hardware: Slice, heads: Sequence[int]) -> list[int]:
    """Devices that may share a copy: they divide the slice and the heads."""
    return [
        n
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        if hardware.num_devices % n == 0 and all(h % n == 0 for h in heads)
    ]


def serving_plan(
    config: TrainConfig,
    slice_name: str,
    *,
    traffic: Traffic = Traffic(),
    tensor: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    prices: str | None = None,
) -> ServingPlan:
    """The plan of a model folder or hub model on a slice; reads config.json only.

    tensor: chips that share one copy; by default the fewest that hold the weights and the wanted
    streams, the other chips hold further copies. quantization: int8 stores weights in
    one byte. kv_cache_dtype: int8 stores keys and values as codes with a scale for each token and
    head. Raises ConfigError for sizes that do not divide.
    """
    if config.model_name_or_path is None:
        raise ConfigError("no model: set model_name_or_path to a folder with a config.json.")
    if quantization not in (None, "int8"):
        raise ConfigError(f"quantization {quantization!r} cannot be planned; needs int8 or nothing")
    if kv_cache_dtype not in ("auto", "int8"):
        raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is not known; it is auto or int8")
    shape = model_shape(
        read_model_config(config.model_name_or_path, config.model_revision),
        config.model_name_or_path,
    )
    if not shape.causal:
        raise ConfigError(f"{shape.name} is an encoder; a serving plan is for models that write.")
    hardware = parse_slice(slice_name)
    activation = ITEM_BYTES.get(shape.dtype if config.dtype == "auto" else config.dtype, 2)
    known_prices = read_prices(prices)
    price = slice_price(hardware, known_prices)

    def of(size: int) -> ServingPlan:
        return ServingPlan(
            shape=shape,
            hardware=hardware,
            traffic=traffic,
            price=price,
            tensor=size,
            item=1 if quantization else activation,
            activation=activation,
            kv_cache_dtype=kv_cache_dtype,
            quantization=quantization,
            prices=known_prices,
        )

    heads = [kind.heads for kind in shape.layers]
    sizes = _tensor_sizes(hardware, heads)
    if tensor is not None and tensor not in sizes:
        raise ConfigError(
            f"tensor {tensor} does not divide {hardware.num_devices} devices and "
            f"{min(heads)} heads; possible: {', '.join(map(str, sizes))}"
        )
    if tensor is not None:
        return of(tensor)
    return next((plan for plan in map(of, sizes) if plan.fits), of(sizes[-1]))


def _weights_read(kind: LayerKind, tokens: int) -> float:
    """Parameters of one layer that a step of so many tokens reads: of experts, those expected."""
    return sum(
        m.inputs * m.outputs * m.copies * (1 - (1 - m.used / m.copies) ** tokens)
        if m.copies > m.used
        else m.size
        for m in kind.matrices
    )


__all__ = [
    "PUBLISHED",
    "PUBLISHED_COMPILED",
    "Load",
    "ServingChange",
    "ServingPlan",
    "Traffic",
    "make_serving_plan",
    "serving_plan",
]
