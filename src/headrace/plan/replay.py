"""Time of a compiled TPU program: its schedule, replayed on the slice's resources.

The optimised module is scheduled, so its order is what the chip will do. Walking it, every
instruction takes its time on one resource: the TensorCore, the chip's links, copies to and from the
host, or the copy engine between HBM and on-chip memory. Starts put work on a resource, a `done`
that comes too early makes the TensorCore wait. Loops are walked once and multiplied.

Times of single instructions:
  matmul fusions       the compiler's own cycles over the clock
  other fusions        HBM bytes over 85 % of the data-sheet bandwidth, or the cycles when fewer
                       (the compiler's cycles for streaming work are 2 to 12 times too many);
                       not less than the vector unit needs for their arithmetic
  attention kernels    visible blocks x matmuls of the kernel over a measured share of the peak
  paged attention      keys and values that it copies over 85 % of the bandwidth (arXiv:2604.15464
                       measured up to 86 % in decode), or its products if they take longer
  collectives          bytes over the links the algorithm uses, plus 1 us a hop
Why not XLA's own cost analysis: it counts a loop once, gives kernels nothing, prices a collective
as HBM bytes, and its seconds can be negative.

Knows: HLO instructions, slices. Does not know: models, tokens, prices.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.kernels.paged_tpu import KEYS_A_BLOCK, QUERIES_A_BLOCK
from headrace.plan.analytic import RATES
from headrace.plan.hardware import Slice
from headrace.plan.hlo import (
    COLLECTIVES,
    HBM,
    HOST,
    ArrayShape,
    Computation,
    Instruction,
    Module,
    group_size,
    matmul_flops,
)
from headrace.plan.loops import trip_count

Bound = Literal["compute", "HBM", "interconnect", "host"]
_FREE = frozenset(
    (
        "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "domain",
        "partition-id", "replica-id", "iota", "add-dependency", "opt-barrier",
        "optimization-barrier",
    )
)  # fmt: skip
_LANES = 8 * 128 * 4  # vector lanes x arithmetic units of a TensorCore
_VECTOR_WORK: Mapping[str, float] = {
    **dict.fromkeys(
        (
            "add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "select", "and",
            "or", "xor", "not", "compare", "clamp", "convert", "shift-left", "shift-right-logical",
            "shift-right-arithmetic", "round-nearest-even", "floor",
        ),
        1.0,
    ),
    **dict.fromkeys(("divide", "rsqrt", "sqrt", "remainder"), 4.0),
    **dict.fromkeys(
        ("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power",
         "sine", "cosine", "erf"),
        8.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PagedRead:
    """What a serving step reads of its cache, which no program says: it is in the page tables.

    decode: rows of one query, whose sequences have `context` keys. Every other row is `block`
    queries of a prompt and sees `prompt` keys, itself included.
    """

    decode: int
    context: int
    block: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Constants that no compiler output gives; none is fitted to a single published run.

    hbm_share: achieved over data-sheet bandwidth of streaming work (copy benchmarks: 0.83 on v6e,
    0.87 on v7x). vmem_over_hbm: on-chip memory's bandwidth (JAX scaling book: about 22).
    hop_seconds: what a link adds to a collective. causal: whether square attention block grids
    are triangles. The splash kernels' shares of the peak are those of the analytic model; products
    of the paged kernel are given the forward one. paged: what a serving step reads of its cache.
    longest_branch: a conditional takes its longest branch, else its shortest (a server whose
    requests ask for nothing special).
    """

    hbm_share: float = 0.85
    vmem_over_hbm: float = 22.0
    hop_seconds: float = 1e-6
    causal: bool = True
    paged: PagedRead | None = None
    longest_branch: bool = True


@dataclass(kw_only=True)
class Part:
    """What one kind of work costs in a step on one device: seconds, FLOPs, HBM bytes."""

    seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    count: float = 0.0
    bound_seconds: dict[Bound, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def bound(self) -> Bound:
        by_size = sorted(self.bound_seconds.items(), key=lambda entry: entry[1])
        return by_size[-1][0] if by_size else "compute"


@dataclass(kw_only=True)
class Timeline:
    """The replayed step.

    seconds: with the overlap of the schedule. busy: seconds of work on each resource. parts: by
    `kind, direction`. link_bytes: bytes a device receives, by collective. notes: what was assumed.
    """

    seconds: float
    busy: Mapping[str, float]
    parts: Mapping[str, Part]
    link_bytes: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def flops(self) -> float:
        """FLOPs of one device in a step, recomputation included."""
        return sum(part.flops for part in self.parts.values())

    @property
    def best_seconds(self) -> float:
        """If all resources worked at the same time: the busiest one."""
        return max(self.busy.values(), default=0.0)

    @property
    def worst_seconds(self) -> float:
        """If nothing overlapped but the two directions of links and of host copies."""
        ways = (
            ("TensorCore",), ("links",), ("links right", "links left"),
            ("copies to host", "copies from host"),
        )  # fmt: skip
        return sum(max(self.busy.get(name, 0.0) for name in names) for names in ways)


DynamicTrips = Callable[[Module, Instruction], int | None]


def replay(
    module: Module,
    hardware: Slice,
    *,
    assumptions: Assumptions | None = None,
    dynamic_trips: DynamicTrips | None = None,
) -> Timeline:
    """Replay one execution of the module's entry.

    dynamic_trips: turns of a loop whose bound is a value of the run; None from it means one turn,
    which is noted.
    """
    return _Replay(module, hardware, assumptions or Assumptions(), dynamic_trips).run()


class _Replay:
    def __init__(
        self,
        module: Module,
        hardware: Slice,
        assumptions: Assumptions,
        dynamic_trips: DynamicTrips | None,
    ) -> None:
        self.module = module
        self.chip = hardware.chip
        self.links = hardware.usable_links
        self.ring = max(hardware.shape)
        self.assumptions = assumptions
        self.dynamic_trips = dynamic_trips
        self.parts: dict[str, Part] = defaultdict(Part)
        self.busy: dict[str, float] = defaultdict(float)
        self.link_bytes: dict[str, float] = defaultdict(float)
        self.notes: Counter[str] = Counter()

    def run(self) -> Timeline:
        seconds = self.walk(self.module.entry, 1.0)
        notes = tuple(f"{text} ({n}x)" if n > 1 else text for text, n in self.notes.items())
        return Timeline(
            seconds=seconds,
            busy=dict(self.busy),
            parts=dict(self.parts),
            link_bytes=dict(self.link_bytes),
            notes=notes,
        )

    def walk(self, name: str, times: float) -> float:
        """Seconds of one execution of a computation; totals are added `times` over."""
        lane = _Lane()
        computation = self.module.computations[name]
        for each in computation.instructions:
            self._visit(computation, each, lane, times)
        return lane.now

    def _visit(
        self, computation: Computation, each: Instruction, lane: _Lane, times: float
    ) -> None:
        origin = next((lane.origin[a] for a in each.operands if a in lane.origin), None)
        if each.op in _FREE:
            if origin is not None:
                lane.origin[each.name] = origin
        elif each.op == "while":
            turns = self._turns(each)
            lane.now += turns * self.walk(each.called or "", times * turns)
        elif each.op == "conditional":
            lane.now += self._conditional(each, times)
        elif each.op == "call" and each.called in self.module.computations:
            lane.now += self.walk(each.called or "", times)
        elif each.op.endswith(("-done", "-update")):
            self._finish(each, lane, times)
        elif each.base_op in COLLECTIVES:
            self._collective(each, each, each.base_op, lane, times)
        elif each.op.endswith("-start"):
            self._start(computation, each, lane, times)
        elif each.op == "custom-call":
            self._kernel(computation, each, lane, times)
        else:
            self._compute(computation, each, lane, times, origin)

    def _turns(self, loop: Instruction) -> int:
        turns = trip_count(self.module, loop)
        if turns is None and self.dynamic_trips is not None:
            turns = self.dynamic_trips(self.module, loop)
        if turns is None:
            place = self.place(loop) or loop.name
            self.notes[f"a loop whose turns depend on data was counted once: {place}"] += 1
            return 1
        return turns

    def _conditional(self, each: Instruction, times: float) -> float:
        text = re.sub(r"/\*.*?\*/", "", each.attributes)
        match = re.search(r"branch_computations=\{([^}]*)\}", text)
        named = match.group(1) if match else ""
        if not named:
            named = " ".join(re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", text))
        branches = [b for b in re.findall(r"%([\w.\-]+)", named) if b in self.module.computations]
        choose = max if self.assumptions.longest_branch else min
        return choose((self.walk(b, times / len(branches)) for b in branches), default=0.0)

    def _finish(self, each: Instruction, lane: _Lane, times: float) -> None:
        source = each.operands[0] if each.operands else ""
        if source not in lane.finished:
            return
        finished, bound, label = lane.finished[source]
        if each.op.endswith("-update"):
            lane.finished[each.name] = lane.finished[source]
            return
        self._wait(finished, bound, label, lane, times)

    def _wait(self, until: float, bound: Bound, label: str, lane: _Lane, times: float) -> None:
        waiting = until - lane.now
        if waiting > 0:
            self._record(f"waiting for {label}", waiting, bound, times)
            lane.now = until

    def _record(
        self,
        part: str,
        seconds: float,
        bound: Bound,
        times: float,
        *,
        flops: float = 0.0,
        hbm_bytes: float = 0.0,
    ) -> None:
        entry = self.parts[part]
        entry.seconds += seconds * times
        entry.flops += flops * times
        entry.hbm_bytes += hbm_bytes * times
        entry.count += times
        entry.bound_seconds[bound] += seconds * times

    def _begin(
        self, name: str, seconds: float, resource: str, bound: Bound, label: str, lane: _Lane,
        times: float,
    ) -> None:  # fmt: skip
        begun = max(lane.busy_until[resource], lane.now)
        lane.busy_until[resource] = begun + seconds
        lane.finished[name] = (begun + seconds, bound, label)
        self.busy[resource] += seconds * times

    # Work on the links.

    def _collective(
        self, each: Instruction, inner: Instruction, kind: str, lane: _Lane, times: float
    ) -> None:
        seconds, moved = self.collective_seconds(each, inner, kind)
        self.link_bytes[kind] += moved * times
        if each.op.endswith("-start") or each.name.startswith("async-collective-start"):
            resource = "links"
            if kind == "collective-permute":
                resource = f"links {_direction(inner)}"
            self._begin(each.name, seconds, resource, "interconnect", kind, lane, times)
            lane.origin[each.name] = each.name
            return
        work = max(seconds, each.cycles / self.chip.clock_hz)
        self.busy["links"] += work * times
        self._record(f"waiting for {kind}", work, "interconnect", times)
        lane.now += work

    def collective_seconds(
        self, each: Instruction, inner: Instruction, kind: str
    ) -> tuple[float, float]:
        """(seconds, bytes that one device receives) of a collective on the slice's links."""
        size = group_size(inner)
        if size <= 1 and kind != "collective-permute":
            return 0.0, 0.0
        num_bytes = _result_bytes(inner, kind)
        link = self.chip.link_bandwidth
        width = link * max(1, min(_links_of(each.attributes + inner.attributes), self.links))
        share = (size - 1) / max(size, 1)
        hops = self.assumptions.hop_seconds * max(size, 1)
        match kind:
            case "all-gather" | "ragged-all-to-all" | "collective-broadcast":
                moved = num_bytes * share
            case "reduce-scatter":
                moved = num_bytes * size * share
            case "all-reduce":
                moved = 2 * num_bytes * share
            case "all-to-all":
                # A bidirectional ring: bytes travel size/4 links on average, two ways at once.
                return num_bytes * min(size, self.ring) / 8 / link + hops, num_bytes * share
            case _:  # collective-permute: one neighbour, one link
                return num_bytes / link + self.assumptions.hop_seconds, num_bytes
        return moved / width + hops, moved

    def _inner_collective(self, name: str | None) -> Instruction | None:
        if not name:
            return None
        found = (i for i in self.module.walk(name) if i.base_op in COLLECTIVES)
        return next(found, None)

    # Copies and other asynchronous work.

    def _start(
        self, computation: Computation, each: Instruction, lane: _Lane, times: float
    ) -> None:
        inner = self._inner_collective(each.called)
        if inner is not None:
            self._collective(each, inner, inner.base_op, lane, times)
            return
        host = any(shape.space == HOST for shape in each.shapes)
        num_bytes = _copied_bytes(computation, each)
        if host:
            to_host = bool(each.shapes) and each.shapes[0].space == HOST
            resource = "copies to host" if to_host else "copies from host"
            seconds = num_bytes / self.chip.host_bandwidth
            self._begin(each.name, seconds, resource, "host", "host copies", lane, times)
            return
        seconds = num_bytes / self.chip.hbm_bandwidth
        self._begin(each.name, seconds, "copy engine", "HBM", "prefetch", lane, times)

    # Work on the TensorCore.

    def _compute(
        self,
        computation: Computation,
        each: Instruction,
        lane: _Lane,
        times: float,
        origin: str | None,
    ) -> None:
        inner = self._inner_collective(each.called) if each.op == "fusion" else None
        if inner is not None and each.name.startswith("async-collective-start"):
            self._collective(each, inner, inner.base_op, lane, times)
            return
        if each.name.startswith("async-collective-done"):
            finished = lane.finished.get(origin or "")
            if finished:
                self._wait(*finished, lane, times)
            return
        if origin is not None:
            lane.origin[each.name] = origin  # computes while a collective runs beside it
        elif inner is not None:
            kind = inner.base_op
            if kind == "all-reduce" and "all-reduce-scatter" in (each.called or ""):
                self._scatter_fusion(each, inner, lane, times)
            else:
                self._collective(each, inner, kind, lane, times)
            return
        flops = matmul_flops(self.module, computation.name, each) if each.is_matmul else 0.0
        on_chip, hbm_bytes = self.traffic(computation, each)
        seconds = self._tensorcore_seconds(each, flops, hbm_bytes, on_chip)
        if not flops:
            seconds = max(seconds, self._vector_seconds(each))
        bound: Bound = "HBM"
        if flops / self.chip.flops > hbm_bytes / self.chip.hbm_bandwidth:
            bound = "compute"
        kind = "matmuls" if flops else "elementwise"
        self._work(self.part(each, kind), seconds, bound, lane, times, flops, hbm_bytes)

    def _scatter_fusion(
        self, each: Instruction, inner: Instruction, lane: _Lane, times: float
    ) -> None:
        """An all-reduce whose result is sliced at once runs as a reduce-scatter."""
        seconds, moved = self.collective_seconds(each, inner, "all-reduce")
        seconds, moved = seconds / 2, moved / 2
        self.link_bytes["reduce-scatter"] += moved * times
        self.busy["links"] += seconds * times
        self._record("waiting for reduce-scatter", seconds, "interconnect", times)
        lane.now += seconds

    def _tensorcore_seconds(
        self, each: Instruction, flops: float, hbm_bytes: float, on_chip: float
    ) -> float:
        cycles = each.cycles / self.chip.clock_hz
        rate = self.chip.hbm_bandwidth
        streaming = hbm_bytes / (rate * self.assumptions.hbm_share)
        streaming = max(streaming, on_chip / (rate * self.assumptions.vmem_over_hbm))
        if each.is_matmul and flops:
            return cycles or max(flops / self.chip.flops, streaming)
        return min(streaming, cycles) if cycles else streaming

    def _vector_seconds(self, each: Instruction) -> float:
        """The vector unit's time for a fusion's own arithmetic, which bounds random numbers and
        transcendentals; never more than the compiler's cycles."""
        inside = self.module.computations.get(each.called or "") if each.op == "fusion" else None
        if inside is None:
            return 0.0
        operations = sum(
            _VECTOR_WORK.get(inner.op, 0.0) * math.prod(inner.shapes[0].sizes)
            for inner in self.module.walk(inside.name)
            if inner.op in _VECTOR_WORK and inner.shapes
        )
        seconds = operations / (self.chip.clock_hz * _LANES * self.chip.tensorcores)
        return min(seconds, each.cycles / self.chip.clock_hz) if each.cycles else seconds

    def _work(
        self, part: str, seconds: float, bound: Bound, lane: _Lane, times: float, flops: float,
        hbm_bytes: float,
    ) -> None:  # fmt: skip
        lane.now += seconds
        self.busy["TensorCore"] += seconds * times
        self._record(part, seconds, bound, times, flops=flops, hbm_bytes=hbm_bytes)

    def traffic(self, computation: Computation, each: Instruction) -> tuple[float, float]:
        """(all bytes, HBM bytes) an instruction touches: of a sliced operand only the slice, of
        an in-place update only the update."""
        reads: list[ArrayShape] = []
        writes = list(each.shapes)
        saved = 0.0
        inside = self.module.computations.get(each.called or "") if each.op == "fusion" else None
        if inside is None:
            for name in each.operands:
                source = computation.by_name.get(name)
                reads += source.shapes if source is not None else ()
            return _sums(reads + writes)
        for parameter in inside.instructions:
            source = _source(computation, each, parameter)
            if source is None:
                continue
            sliced, update = _partial_use(inside, parameter)
            if sliced is not None:
                spaces = {shape.space for shape in source.shapes}
                space = HBM if HBM in spaces else next(iter(spaces), HBM)
                reads += [ArrayShape(dtype=s.dtype, sizes=s.sizes, space=space) for s in sliced]
            elif update is not None:
                saved += sum(s.num_bytes for s in parameter.shapes) - update
            else:
                reads += source.shapes
        total, hbm = _sums(reads + writes)
        return max(0.0, total - saved), max(0.0, hbm - saved)

    # Kernels.

    def _kernel(
        self, computation: Computation, each: Instruction, lane: _Lane, times: float
    ) -> None:
        target = re.search(r'custom_call_target="([^"]+)"', each.attributes)
        if target is None or target.group(1) != "tpu_custom_call":
            return
        operands = [
            shape
            for name in each.operands
            if (source := computation.by_name.get(name)) is not None
            for shape in source.shapes
        ]
        _, hbm_bytes = _sums([*operands, *each.shapes])
        flops, share = self.attention_flops(each, operands)
        if self.assumptions.paged is not None and "ragged_paged_attention" in each.name:
            flops, hbm_bytes = _paged_work(self.assumptions.paged, operands)
            share, _ = RATES[self.chip.name].attention_at(operands[-1].sizes[-1])
        streaming = hbm_bytes / (self.chip.hbm_bandwidth * self.assumptions.hbm_share)
        if not flops:
            name = re.sub(r"[.\d]+$", "", each.name)
            given = _stated_cost(each)
            flops, share = given, 0.5
            if not given:
                self.notes[f"kernel {name} was priced by its HBM bytes"] += 1
        work = flops / (self.chip.flops * share)
        bound: Bound = "compute" if work > streaming else "HBM"
        part = self.part(each, "attention")
        self._work(part, max(work, streaming), bound, lane, times, flops, hbm_bytes)

    def attention_flops(self, each: Instruction, operands: list[ArrayShape]) -> tuple[float, float]:
        """(FLOPs, achieved share of the peak) of a splash attention kernel; (0, 1) of others."""
        if not re.search("splash|flash", each.name):
            return 0.0, 1.0
        arrays = [s for s in operands if s.dtype in ("bf16", "f32") and len(s.sizes) >= 3]
        if not arrays:
            return 0.0, 1.0
        query = arrays[0]
        length, head = query.sizes[-2:]
        keys = arrays[1].sizes[-2] if len(arrays) > 1 else length
        pairs = math.prod(query.sizes[:-2]) * length * keys
        pairs *= self._visible_share(operands)
        fused = '\\"use_fused_bwd_kernel\\": true' in each.attributes
        forward, backward = RATES[self.chip.name].attention_at(head)
        products, share = 2, forward
        if "dkv" in each.name:
            products, share = (5 if fused else 4), backward
        elif "dq" in each.name:
            products, share = 3, backward
        return 2.0 * products * pairs * head, share

    def _visible_share(self, operands: list[ArrayShape]) -> float:
        """Share of attention blocks that are computed, from the kernel's block table [heads, query
        blocks, key blocks]: windows shrink it, a causal mask leaves a triangle of a square one."""
        table = next((s for s in operands if s.dtype == "s8" and len(s.sizes) == 3), None)
        if table is None:
            return 0.5 if self.assumptions.causal else 1.0
        rows, columns = sorted(table.sizes[1:], reverse=True)
        if rows != columns:
            return columns / rows
        return (rows + 1) / (2 * rows) if self.assumptions.causal else 1.0

    # Which part of the step an instruction belongs to.

    def place(self, each: Instruction) -> str:
        frames = self.module.frames.get(each.frame, ())
        return frames[0].rpartition("/")[2] if frames else ""

    def part(self, each: Instruction, kind: str) -> str:
        """`kind, direction`, from the Python functions and JAX transformations it came from."""
        frames = " ".join(self.module.frames.get(each.frame, ()))
        if "linear_cross_entropy.py" in frames or "losses.py:_token_loss" in frames:
            return "loss head"
        if "optimizers.py" in frames or "_apply_sums" in frames:
            return "optimizer"
        if "/attention" in frames and "kernels" in frames:
            kind = "attention"
        name = each.op_name
        if kind == "attention" and re.search(r"dkv|dq", each.name):
            return f"{kind}, backward"
        if "rematted_computation" in name:
            return f"{kind}, recomputed"
        if "transpose(" in name:
            return f"{kind}, backward"
        return f"{kind}, forward"


class _Lane:
    """The clock of one computation, and what runs beside the TensorCore in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until: dict[str, float] = defaultdict(float)
        self.finished: dict[str, tuple[float, Bound, str]] = {}
        self.origin: dict[str, str] = {}


def _sums(shapes: list[ArrayShape]) -> tuple[float, float]:
    total = sum(shape.num_bytes for shape in shapes)
    return total, sum(shape.num_bytes for shape in shapes if shape.space == HBM)


def _paged_work(read: PagedRead, operands: list[ArrayShape]) -> tuple[float, float]:
    """(FLOPs, HBM bytes) of jax's ragged paged attention kernel.

    For every pair of a block of queries and a row that has queries in it, the kernel copies the
    row's keys and values, whole blocks of them, and multiplies them with all queries of the block.
    It masks what a window hides, but does not skip it.
    """
    tables = next(s for s in operands if s.dtype == "s32" and len(s.sizes) == 2)
    queries, pages = operands[-2], operands[-1]
    tokens, heads, head = queries.sizes
    block = min(tables.sizes[1] * pages.sizes[1], KEYS_A_BLOCK)
    rows = tables.sizes[0] - read.decode
    starts = [read.decode + read.block * i for i in range(rows)]
    pairs = sum(
        (start + read.block - 1) // QUERIES_A_BLOCK - start // QUERIES_A_BLOCK + 1
        for start in starts
    )
    keys = read.decode * _whole_blocks(read.context, block)
    keys += pairs * _whole_blocks(read.prompt, block)
    a_key = pages.num_bytes / math.prod(pages.sizes[:2])
    flops = 4.0 * head * heads * min(tokens, QUERIES_A_BLOCK) * keys
    return flops, keys * a_key + 2 * queries.num_bytes


def _whole_blocks(keys: int, block: int) -> int:
    return -(-keys // block) * block


def _source(
    computation: Computation, fusion: Instruction, parameter: Instruction
) -> Instruction | None:
    if parameter.op != "parameter" or not parameter.argument_text.isdigit():
        return None
    number = int(parameter.argument_text)
    if number >= len(fusion.operands):
        return None
    return computation.by_name.get(fusion.operands[number])


def _partial_use(
    inside: Computation, parameter: Instruction
) -> tuple[list[ArrayShape] | None, float | None]:
    """(slices read of it, None), (None, bytes of the in-place update) or (None, None): all."""
    users = inside.users.get(parameter.name, [])
    name = parameter.name
    while len(users) == 1 and users[0].op in ("bitcast", "reshape"):
        name = users[0].name
        users = inside.users.get(name, [])
    if users and all(u.op in ("dynamic-slice", "slice", "gather") for u in users):
        return [shape for user in users for shape in user.shapes], None
    # operand of the update: dynamic-update-slice(x, update, ...), scatter(x, places, update)
    places = {"dynamic-update-slice": 1, "scatter": 2}
    updates = [u for u in users if u.op in places and u.operands[0] == name]
    if updates and len(updates) == len(users):
        written = [inside.by_name.get(u.operands[places[u.op]]) for u in updates]
        return None, float(sum(s.num_bytes for w in written if w is not None for s in w.shapes))
    return None, None


def _result_bytes(collective: Instruction, kind: str) -> float:
    """Bytes of the result on one device; a start's type holds operands and results."""
    arrays = [shape for shape in collective.shapes if shape.sizes]
    if collective.op.endswith("-start") and kind != "all-reduce" and len(arrays) > 1:
        arrays = arrays[len(arrays) // 2 :]
    return float(sum(shape.num_bytes for shape in arrays))


def _copied_bytes(computation: Computation, start: Instruction) -> float:
    arrays = [shape for shape in start.shapes if shape.sizes]
    if start.op == "dynamic-update-slice-start" and len(start.operands) > 1:
        update = computation.by_name.get(start.operands[1])
        arrays = list(update.shapes) if update is not None else arrays
        return float(sum(shape.num_bytes for shape in arrays))
    return float(min((shape.num_bytes for shape in arrays), default=0))


def _links_of(attributes: str) -> int:
    """Links the chosen algorithm uses at once, as the backend's configuration says."""
    colors = re.search(r"(\w*)Strategy\w*\{colors:(\d+)", attributes)
    if colors:
        return int(colors.group(2)) * (1 if "UniDirection" in attributes else 2)
    emitter = re.search(r'"emitter":"(\d)DAllGather', attributes)
    return 2 * int(emitter.group(1)) if emitter else 2


def _direction(permute: Instruction) -> str:
    """Neighbours to the right and to the left are reached over different links."""
    match = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", permute.attributes)
    if match is None:
        return "right"
    pairs = re.findall(r"\{(\d+),(\d+)\}", permute.attributes[match.start() :])
    ahead = sum(int(target) > int(source) for source, target in pairs)
    return "right" if 2 * ahead >= len(pairs) else "left"


def _stated_cost(kernel: Instruction) -> float:
    """FLOPs that a Pallas call states of itself (`cost_estimate`), 0 without."""
    match = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', kernel.attributes)
    return float(match.group(1)) if match else 0.0
