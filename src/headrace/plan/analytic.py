"""Memory and time of a candidate without a compiler: sums over matrices, tokens and links.

It answers at once, on every machine, and for GPUs; it prunes a search and is marked as not
compiled wherever it is shown. Its few constants stand in `Rates`, are the same for all models, and
come from data sheets and from what the TPU compiler gives for programs of other shapes.

Knows: model shapes, candidates. Does not know: programs, JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.config import TrainConfig
from headrace.plan.candidate import Candidate
from headrace.plan.shape import LayerKind, ModelShape

GB = 1e9
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOSS_CHUNK_BYTES = 2**26  # float32 logits of a chunk of at least 512 tokens, see kernels


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achieved shares of data-sheet rates. attention: of bf16 FLOPs, in the forward and backward
    kernels at head size 128. unit: features that the matrix unit multiplies at once; heads that
    are narrower leave a part of it idle. links: of one-way bandwidth.

    spread: how far the true time may lie from the estimate, as a factor either way.
    """

    matmul: float
    attention: tuple[float, float]
    hbm: float
    links: float
    spread: float
    unit: int = 128

    def attention_at(self, head_size: int) -> tuple[float, float]:
        """(forward, backward) for heads of this size."""
        width = min(head_size, self.unit) / 128
        forward, backward = (min(_BEST_ATTENTION, share * width) for share in self.attention)
        return forward, backward


_BEST_ATTENTION = 0.6  # softmax between the products keeps kernels below this, however wide heads


RATES: Mapping[str, Rates] = {
    "v4": Rates(matmul=0.75, attention=(0.55, 0.50), hbm=0.85, links=0.9, spread=1.3),
    "v5e": Rates(matmul=0.75, attention=(0.55, 0.50), hbm=0.85, links=0.9, spread=1.3),
    "v5p": Rates(matmul=0.75, attention=(0.55, 0.50), hbm=0.85, links=0.9, spread=1.3),
    "v6e": Rates(matmul=0.70, attention=(0.40, 0.36), hbm=0.85, links=0.9, spread=1.35, unit=256),
    "v7x": Rates(matmul=0.65, attention=(0.40, 0.36), hbm=0.85, links=0.9, spread=1.4, unit=256),
    "a100": Rates(matmul=0.70, attention=(0.45, 0.45), hbm=0.80, links=0.7, spread=1.5),
    "h100": Rates(matmul=0.60, attention=(0.45, 0.45), hbm=0.80, links=0.7, spread=1.5),
    "h200": Rates(matmul=0.60, attention=(0.45, 0.45), hbm=0.80, links=0.7, spread=1.5),
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """memory: bytes on one device by cause. seconds: of an optimizer step, with `low`..`high`.

    model_flops: of a step on all devices, nothing recomputed (what MFU counts).
    """

    memory: Mapping[str, int]
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    model_flops: float

    @property
    def hbm_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained of a model: numbers of parameters. stored: bytes of the model's weights."""

    shape: ModelShape
    task: str
    trained: int
    frozen: int
    adapter: int
    item: int
    stored: float
    optimizer_bytes: int  # of one trained parameter

    @property
    def adapts(self) -> bool:
        return self.adapter > 0


# Share of the gathers that does not run beside matmuls. Compiled with the default flags programs
# showed a quarter to all of them, with the overlapping sets next to nothing.
_SEEN = {"default": 0.6}
_OPTIMIZER_BYTES = {"adamw": 8, "lion": 4, "sgd": 4, "adafactor": 0}


def training_of(config: TrainConfig, shape: ModelShape) -> Training:
    """Which parameters a configuration trains."""
    targets = config.lora_target_modules
    adapter = shape.lora_size(config.lora_r, targets) if config.use_peft else 0
    head = shape.hidden * shape.hidden if config.task != "causal" else 0
    dtype = shape.dtype if config.dtype == "auto" else config.dtype
    return Training(
        shape=shape,
        task=config.task,
        trained=adapter + head if config.use_peft else shape.size + head,
        frozen=shape.size if config.use_peft else 0,
        adapter=adapter,
        item=ITEM_BYTES.get(dtype, 4),
        stored=_stored_bytes(config.quantization, shape, ITEM_BYTES.get(dtype, 4)),
        optimizer_bytes=_OPTIMIZER_BYTES[config.optim],
    )


# Bytes of a quantised weight: its code, and for blocks of 64 a scale of two bytes.
_QUANTIZED = {"int8": 1.0, "int4": 0.5 + 2 / 64, "nf4": 0.5 + 2 / 64}


def _stored_bytes(quantization: str | None, shape: ModelShape, item: int) -> float:
    if quantization is None:
        return float(shape.size * item)
    inside = sum(kind.count * m.size for kind in shape.layers for m in kind.matrices)
    return inside * _QUANTIZED[quantization] + (shape.size - inside) * item


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a program is written, as far as its time depends on it.

    kept: linear layers whose results a layer keeps for its backward pass, None for all.
    keeps_attention: whether it keeps what the attention kernel made. on_host: kept there.
    block: tokens of an attention block. backward_products: matmuls of the backward attention
    kernels for one position (7 in two kernels, 5 in one; the forward kernel has 2).
    """

    kept: frozenset[str] | None = frozenset()
    keeps_attention: bool = False
    on_host: bool = False
    block: int = 512
    backward_products: int = 7

    @property
    def recomputes(self) -> bool:
        return self.kept is not None or not self.keeps_attention


_FORMS: Mapping[str, Form] = {
    "none": Form(kept=None, keeps_attention=True),
    "dots": Form(kept=None),
    "attention": Form(keeps_attention=True),
    "offload": Form(keeps_attention=True, on_host=True),
    "full": Form(),
    "auto": Form(),
}


def form_of(candidate: Candidate) -> Form:
    """How Headrace's own program is written; flash attention on GPUs has small blocks and one
    backward kernel."""
    form = _FORMS[candidate.remat]
    return form if candidate.hardware.is_tpu else replace(form, block=128, backward_products=5)


def estimate(
    training: Training,
    candidate: Candidate,
    *,
    supervised_share: float = 1.0,
    form: Form | None = None,
) -> Estimate:
    """The analytic answer; a millisecond. form: another program's than Headrace's own."""
    parts = _times(training, candidate, supervised_share, form or form_of(candidate))
    compute = sum(v for k, v in parts.items() if not k.startswith(("links", "host")))
    gathers = parts.get("links: weights and gradients", 0.0)
    exposed = parts.get("links: activations", 0.0)
    seen = _SEEN.get(candidate.flags, 0.1)
    seconds = max(compute, gathers, parts.get("host copies", 0.0))
    seconds += seen * min(compute, gathers) + exposed
    rates = RATES[candidate.hardware.chip.name]
    return Estimate(
        memory=memory_by_cause(training, candidate),
        seconds=seconds,
        low=seconds / rates.spread,
        high=seconds * rates.spread,
        parts=parts,
        model_flops=model_flops(training, candidate),
    )


def model_flops(training: Training, candidate: Candidate) -> float:
    """FLOPs of a step on all devices: forward, gradients of activations, gradients of what is
    trained; attention by the pairs a query sees."""
    shape, tokens = training.shape, candidate.step_positions
    matrices = sum(kind.count * kind.used for kind in shape.layers)
    head = shape.embedding if shape.causal and training.task == "causal" else 0
    backward = 3 if candidate.trains else 1
    per_token = 2.0 * (matrices + head) * _products(training, candidate)
    per_token += 2.0 * training.adapter * backward
    attention = sum(
        kind.count * backward * _attention_flops(kind, candidate.length, shape.causal)
        for kind in shape.layers
    )
    return tokens * per_token + tokens / candidate.length * attention


def _attention_flops(kind: LayerKind, length: int, causal: bool) -> float:
    """Forward FLOPs of one row in one layer."""
    seen = length / 2 if causal else float(length)
    if kind.window is not None:
        seen = min(seen, float(kind.window))
    return 4.0 * length * seen * kind.heads * kind.head_size


def memory_by_cause(training: Training, candidate: Candidate) -> dict[str, int]:
    """Bytes on one device, under the names that the compiled plan uses."""
    shape, item = training.shape, training.item
    split = candidate.axis("fsdp") * candidate.axis("tensor") * candidate.axis("expert")
    trained = _trained_locally(training, candidate)
    tokens = candidate.device_tokens
    kept = _kept(training, candidate) * tokens if candidate.trains else 0.0
    layer = _working(training, candidate) * tokens
    gathered = 0.0
    if candidate.axis("fsdp") > 1:
        biggest = max(kind.size for kind in shape.layers)
        gathered = 2.0 * biggest * item / candidate.axis("tensor")
    logits = head = 0.0
    if training.task == "causal":
        head = 2.0 * shape.embedding * item if split > 1 else 0.0  # gathered, in two layouts
        chunk = max(_LOSS_CHUNK_BYTES, 4 * 512 * shape.vocabulary)
        logits = min(chunk, 4.0 * tokens * shape.vocabulary)
    compute_copies = 0.0 if item == 4 else trained * item
    head_gradient = 0.0
    if not training.adapts and training.task == "causal":
        head_gradient = 4.0 * shape.embedding / split
    sums = 4.0 if candidate.accumulation == 1 else 8.0  # gradients, and what they are added to
    gradients = sums * trained + logits + head_gradient if candidate.trains else 0.0
    found = {
        "frozen weights": training.stored / split if training.frozen else 0.0,
        "trained weights (float32)": 4.0 * trained,
        "optimizer": training.optimizer_bytes * trained if candidate.trains else 0.0,
        "batch and buffers": 4.0 * 4 * candidate.accumulation * tokens,
        "activations kept": kept,
        "logits of a chunk": logits,
        # gradients, their accumulators, a layer's own values, gathered weights
        "temporaries": gradients + compute_copies + max(layer + gathered, head) + logits,
        "program": 48e6,
    }
    return {name: int(value) for name, value in found.items()}


_ROW_WISE = ("o_proj", "down_proj", "experts.down_proj")


def _trained_locally(training: Training, candidate: Candidate) -> float:
    """Trained parameters on one device. An adapter's A follows the input axis of its matrix and B
    the output axis, so one of them is whole along fsdp and the other along tensor."""
    fsdp, tensor = candidate.axis("fsdp"), candidate.axis("tensor")
    split = fsdp * tensor * candidate.axis("expert")
    if not training.adapts:
        return training.trained / split
    inputs_first = sum(
        kind.count * (m.inputs / (tensor if m.name in _ROW_WISE else fsdp))
        + kind.count * (m.outputs / (fsdp if m.name in _ROW_WISE else tensor))
        for kind in training.shape.layers
        for m in kind.matrices
        if m.copies == 1
    )
    whole = sum(
        kind.count * (m.inputs + m.outputs)
        for kind in training.shape.layers
        for m in kind.matrices
        if m.copies == 1
    )
    return training.adapter * inputs_first / whole + (training.trained - training.adapter) / split


def _layer_values(training: Training, kind: LayerKind, candidate: Candidate, policy: str) -> float:
    """Values that one layer keeps for one token under a remat policy, its input apart."""
    hidden, tensor = training.shape.hidden, candidate.axis("tensor")
    products = sum(
        m.outputs * m.used / (1 if m.name in _ROW_WISE else tensor) for m in kind.matrices
    )
    match policy:
        case "full" | "offload":
            return 0.0
        case "attention":
            return kind.heads * kind.head_size / tensor
        case "dots":
            return products * (2.0 if training.adapts else 1.0)
        case _:
            return 6.0 * hidden + products * (2.6 if training.adapts else 2.2)


def _kept(training: Training, candidate: Candidate) -> float:
    """Bytes of activations kept for one token until the backward pass: the input of every turn of
    the layer loop, and what the policy keeps inside. What is offloaded is not on the device."""
    if candidate.remat == "offload":
        return 0.0
    shape = training.shape
    inputs = shape.num_layers / shape.period * shape.hidden
    inside = sum(
        kind.count * _layer_values(training, kind, candidate, candidate.remat)
        for kind in shape.layers
    )
    return training.item * (inputs + inside)


def _working(training: Training, candidate: Candidate) -> float:
    """Bytes for one token while one turn of the layer loop is computed backward: all that its
    layers make, but what was kept already."""
    shape = training.shape
    share = shape.period / shape.num_layers
    if not candidate.trains:  # values of a layer die as it goes on
        widest = max(kind.feed_forward / candidate.axis("tensor") for kind in shape.layers)
        return training.item * (4.0 * shape.hidden + 2.0 * widest)
    values = sum(
        kind.count
        * share
        * (
            _layer_values(training, kind, candidate, "none")
            - _layer_values(training, kind, candidate, candidate.remat)
        )
        for kind in shape.layers
    )
    return training.item * max(values, 4.0 * shape.hidden)


def _products(training: Training, candidate: Candidate) -> float:
    """How often a token is multiplied with a weight: forward, for the gradient of what it came
    from, and for the weight's own."""
    if not candidate.trains:
        return 1.0
    return 2.0 if training.adapts else 3.0


def _again(kind: LayerKind, shape: ModelShape, form: Form) -> float:
    """Parameters of a layer that one token is multiplied with a second time.

    The backward pass needs what came into every linear layer. So the last one of a layer is not
    computed again, unless a norm behind it needs its result.
    """
    if form.kept is None:
        return 0.0
    spared = form.kept if shape.norms_last else form.kept | {"down_proj", "experts.down_proj"}
    return sum(m.inputs * m.outputs * m.used for m in kind.matrices if m.name not in spared)


def _seen_keys(kind: LayerKind, length: int, causal: bool, block: int) -> float:
    """Keys that a kernel computes for one query: whole blocks, most of them visible."""
    block = min(block, length)
    every = (length + block) / 2 if causal else float(length)
    if kind.window is None:
        return every
    return min(every, float(block * (1 + -(-(kind.window - 1) // block))))


def _attention_seconds(
    training: Training, candidate: Candidate, form: Form, rates: Rates, flops: float
) -> float:
    """Of one device's kernels for one token."""
    found = 0.0
    for kind in training.shape.layers:
        keys = _seen_keys(kind, candidate.length, training.shape.causal, form.block)
        product = 2.0 * keys * kind.heads * kind.head_size * kind.count / flops
        forward, backward = rates.attention_at(kind.head_size)
        times = 1 if not candidate.trains or form.keeps_attention else 2
        found += 2 * times * product / forward
        if candidate.trains:
            found += form.backward_products * product / backward
    return found / candidate.axis("tensor")


def _times(
    training: Training, candidate: Candidate, supervised_share: float, form: Form
) -> dict[str, float]:
    """Seconds of a step on each kind of work, on one device."""
    shape, chip = training.shape, candidate.hardware.chip
    rates = RATES[chip.name]
    tensor, trains = candidate.axis("tensor"), candidate.trains
    tokens = candidate.device_tokens * candidate.accumulation
    rate = chip.flops * rates.matmul * (1.0 if training.item == 2 else 0.35)
    products = _products(training, candidate)
    matrices = sum(
        kind.count * (kind.used * products + (_again(kind, shape, form) if trains else 0.0))
        for kind in shape.layers
    )
    found = {"matmuls": 2.0 * tokens * matrices / tensor / rate}
    if training.adapts:
        passes = 1.0 if not trains else 4.0 if form.recomputes else 3.0
        found["adapters"] = 2.0 * tokens * training.adapter / tensor * passes / (rate * 0.5)
    found["attention"] = tokens * _attention_seconds(training, candidate, form, rates, chip.flops)
    stream = chip.hbm_bandwidth * rates.hbm
    found["elementwise"] = tokens * _streamed(training, candidate, form) / stream
    if training.task == "causal":
        # a head is computed once for a chunk, and its gradient with it
        head = shape.embedding / tensor * tokens * supervised_share
        found["loss head"] = 2.0 * head * products / (rate * 0.8)
    trained = _trained_locally(training, candidate)
    update = 8.0 + 2 * training.optimizer_bytes + 2 * training.item + 8 * candidate.accumulation
    if trains:
        found["optimizer"] = trained * update / stream
    if trains and form.on_host:
        found["host copies"] = tokens * _moved(training, candidate, form) / chip.host_bandwidth
    return found | _link_times(training, candidate, form)


def _moved(training: Training, candidate: Candidate, form: Form) -> float:
    """Bytes for one token that go to the host, and come back: layers' inputs and what they keep."""
    values = sum(
        kind.count
        * (
            training.shape.hidden
            + sum(m.outputs for m in kind.matrices if m.name in (form.kept or ()))
            + (kind.heads * kind.head_size if form.keeps_attention else 0)
        )
        for kind in training.shape.layers
    )
    return values * training.item / candidate.axis("tensor")


def _streamed(training: Training, candidate: Candidate, form: Form) -> float:
    """HBM bytes for one token of everything that is not a product: norms, activations, copies."""
    shape, tensor = training.shape, candidate.axis("tensor")
    values = sum(
        kind.count
        * (6 * shape.hidden + (1.5 * kind.feed_forward + 3 * kind.heads * kind.head_size) / tensor)
        for kind in shape.layers
    )
    passes = 1.0 if not candidate.trains else 3.2 if form.recomputes else 2.2
    return values * training.item * passes


def _link_times(training: Training, candidate: Candidate, form: Form) -> dict[str, float]:
    hardware, chip = candidate.hardware, candidate.hardware.chip
    rate = chip.link_bandwidth * hardware.usable_links * RATES[chip.name].links
    found: dict[str, float] = {}
    fsdp, data, tensor = (candidate.axis(name) for name in ("fsdp", "data", "tensor"))
    weights = training.stored / tensor
    gathers = 2 if candidate.trains else 1
    moved = 0.0
    if fsdp > 1:
        share = (fsdp - 1) / fsdp
        moved += weights * share * gathers * candidate.accumulation
        if candidate.trains and not training.adapts:
            moved += 2 * weights * share * candidate.accumulation
    if data > 1 and candidate.trains:
        moved += 2 * 4.0 * training.trained / fsdp / tensor * (data - 1) / data
    if moved:
        found["links: weights and gradients"] = moved / rate
    if tensor > 1:
        tokens = candidate.device_tokens * candidate.accumulation
        sums = training.shape.num_layers * _sums(training.shape, candidate, form)
        moved = sums * tokens * training.shape.hidden * training.item * 2 * (tensor - 1) / tensor
        found["links: activations"] = moved / rate
    return found


def _sums(shape: ModelShape, candidate: Candidate, form: Form) -> float:
    """Sums of activations over `tensor` in a layer: behind its two row-wise linear layers, in front
    of the column-wise ones in the backward pass, and what is computed again."""
    if not candidate.trains:
        return 2.0
    if form.kept is None:
        return 4.0
    return 4.0 + ("o_proj" not in form.kept) + shape.norms_last
