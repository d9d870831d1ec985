"""Reading the text of a scheduled, optimised HLO module.

`compiled.as_text()` is the only complete account of what XLA will run: instructions in the order of
the schedule, shapes with layouts and memory spaces, the compiler's own cycle estimates, loop
bounds and, through stack frames, the Python function each instruction came from. This file turns
it into objects and answers questions about single instructions: bytes, FLOPs, trip counts, groups.

Knows: the text format. Does not know: chips, time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Bytes of an element; 4- and 2-bit integers are packed.
_ITEM_BYTES: Mapping[str, float] = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "s8": 1, "u8": 1,
    "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3b11fnuz": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b(pred|[su](?:2|4|8|16|32|64)|bf16|f8\w+|f4\w+|f16|f32|f64|c64)\[([\d,]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*?(?:S\((\d+)\))?[^{}]*\}")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$", re.DOTALL)
_STARTS_LINE = re.compile(r"^(?:\s+(?:ROOT )?%|%|ENTRY |\}|HloModule|$|[A-Z]\w+$|\d+ )")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%([\w.\-]+)")
_NAMES = re.compile(r"%([\w.\-]+)")

HBM, VMEM, HOST = 0, 1, 5  # memory spaces of TPU layouts: S(1) is on the chip, S(5) is the host's

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArrayShape:
    """One array of an instruction's result: element type, sizes, memory space."""

    dtype: str
    sizes: tuple[int, ...]
    space: int

    @property
    def num_bytes(self) -> int:
        return math.ceil(math.prod(self.sizes) * _ITEM_BYTES.get(self.dtype, 4))


@functools.lru_cache(maxsize=65536)
def read_shapes(text: str) -> tuple[ArrayShape, ...]:
    """The arrays in a type such as `(bf16[8,128]{1,0:T(8,128)S(1)}, u32[])`, tuples flattened."""
    found: list[ArrayShape] = []
    for match in _ARRAY.finditer(text):
        layout = _LAYOUT.match(text, match.end())
        space = re.search(r"S\((\d+)\)", layout.group(0)) if layout else None
        sizes = tuple(int(size) for size in match.group(2).split(",") if size)
        found.append(
            ArrayShape(
                dtype=match.group(1), sizes=sizes, space=int(space.group(1)) if space else HBM
            )
        )
    return tuple(found)


@dataclass(eq=False, kw_only=True)
class Instruction:
    """One line of a computation. `attributes` is all that follows the operands."""

    name: str
    type_text: str
    op: str
    operands: tuple[str, ...]
    argument_text: str
    attributes: str
    is_root: bool

    @property
    def shapes(self) -> tuple[ArrayShape, ...]:
        return read_shapes(self.type_text)

    @functools.cached_property
    def called(self) -> str | None:
        """The computation a fusion, call, async start or while body refers to."""
        match = re.search(r"\b(?:calls|to_apply|body)=%([\w.\-]+)", self.attributes)
        return match.group(1) if match else None

    @functools.cached_property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it gives none or only a sentinel."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        cycles = int(match.group(1)) if match else 0
        return cycles if cycles < 2**60 else 0

    @functools.cached_property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @functools.cached_property
    def frame(self) -> int:
        match = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def base_op(self) -> str:
        return self.op.removesuffix("-start").removesuffix("-done").removesuffix("-update")

    @property
    def is_matmul(self) -> bool:
        """TPU matmuls are convolutions, alone or as the heart of an output fusion."""
        fused = self.op == "fusion" and "kind=kOutput" in self.attributes
        return fused or self.op in ("convolution", "dot")


@dataclass(eq=False, kw_only=True)
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {each.name: each for each in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for operand in each.operands:
                found.setdefault(operand, []).append(each)
        return found


@dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed module. `frames` gives, for a stack frame id, the files and functions of its
    stack from the innermost outwards."""

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, tuple[str, ...]]
    is_scheduled: bool

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """Where each computation is used: the computation and instruction that name it."""
        found: dict[str, tuple[str, Instruction]] = {}
        for computation in self.computations.values():
            for each in computation.instructions:
                for called in _CALLED.findall(each.attributes):
                    found[called] = (computation.name, each)
        return found

    def operand(self, computation: str, name: str) -> Instruction | None:
        return self.computations[computation].by_name.get(name)

    def walk(self, name: str) -> Iterator[Instruction]:
        """Instructions of a computation and of the fusions and calls inside it."""
        for each in self.computations[name].instructions if name in self.computations else ():
            yield each
            if each.called and each.op in ("fusion", "call", "async-start", "call-start"):
                yield from self.walk(each.called)


def parse_module(text: str) -> Module:
    """Parse `compiled.as_text()`. A few seconds for each 10 MB.

    Raises ValueError when the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _joined_lines(text):
        opening = _COMPUTATION.match(line)
        if opening:
            current = Computation(name=opening.group(2))
            computations[current.name] = current
            entry = current.name if opening.group(1) else entry
            continue
        match = _INSTRUCTION.match(line)
        if match and current is not None:
            current.instructions.append(_instruction(match))
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    head = text[: text.find("\n")]
    return Module(
        computations=computations,
        entry=entry,
        frames=_frames(text),
        is_scheduled="is_scheduled=true" in head,
    )


def _joined_lines(text: str) -> list[str]:
    """Lines, with attributes that span several (kernel metadata) brought back to their own."""
    lines: list[list[str]] = []
    for line in text.split("\n"):
        if _STARTS_LINE.match(line) or not lines:
            lines.append([line])
        else:
            lines[-1].append(line)
    return [" ".join(parts) for parts in lines]


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match.group(3)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    arguments = rest[opening + 1 : closing]
    op = rest[:opening]
    literal = op in ("constant", "parameter")
    return Instruction(
        name=match.group(2),
        type_text=type_text,
        op=op,
        operands=() if literal else tuple(_NAMES.findall(arguments)),
        argument_text=arguments if literal else "",
        attributes=rest[closing + 1 :],
        is_root=bool(match.group(1)),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Stack frame id -> `file:function` from the innermost frame outwards."""
    files = _table(text, "FileNames")
    functions = _table(text, "FunctionNames")
    locations = {key: _numbers(row) for key, row in _table(text, "FileLocations").items()}
    frames = {key: _numbers(row) for key, row in _table(text, "StackFrames").items()}

    def place(frame: Mapping[str, int]) -> str:
        where = locations.get(frame.get("file_location_id", 0), {})
        file = files.get(where.get("file_name_id", 0), "").strip('"')
        name = functions.get(where.get("function_name_id", 0), "").strip('"')
        return f"{file}:{name}"

    found: dict[int, tuple[str, ...]] = {}
    for key in sorted(frames):
        parent = frames[key].get("parent_frame_id", 0)
        outer = found.get(parent, ()) if parent != key else ()
        found[key] = (place(frames[key]), *outer)
    return found


def _table(text: str, title: str) -> dict[int, str]:
    start = text.find(f"\n{title}\n")
    if start < 0:
        return {}
    rows: dict[int, str] = {}
    for line in text[start + len(title) + 2 :].split("\n"):
        number, _, value = line.partition(" ")
        if not number.isdigit():
            break
        rows[int(number)] = value
    return rows


def _numbers(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


def group_size(collective: Instruction) -> int:
    """Devices that take part together in a collective."""
    return devices_together(collective.attributes)


def devices_together(text: str) -> int:
    """Size of the first group in `replica_groups`, in each form that XLA writes; 1 without any."""
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if explicit:
        return len(explicit.group(1).split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", text)
    if iota:
        return int(iota.group(2))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
        return math.prod(sizes.get(axis, 1) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    return 1


def matmul_flops(module: Module, computation: str, instruction: Instruction) -> float:
    """Multiply-adds times two of a convolution, a dot, or of all inside a fusion."""
    if instruction.op == "fusion" and instruction.called:
        inside = module.computations.get(instruction.called)
        if inside is None:
            return 0.0
        return sum(matmul_flops(module, inside.name, each) for each in inside.instructions)
    if instruction.op not in ("convolution", "dot") or len(instruction.operands) != 2:
        return 0.0
    both = [module.operand(computation, name) for name in instruction.operands]
    if both[0] is None or both[1] is None or not instruction.shapes:
        return 0.0
    left, right, out = both[0].shapes[0], both[1].shapes[0], instruction.shapes[0]
    if instruction.op == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(d) for d in match.group(1).split(",") if d] if match else []
        return 2.0 * math.prod(out.sizes) * math.prod(left.sizes[d] for d in dims)
    return _convolution_flops(instruction.attributes, left.sizes, right.sizes, out.sizes)


def _convolution_flops(
    attributes: str, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> float:
    """Only pairs of positions that really meet are counted: XLA writes batched products as
    convolutions whose windows mostly fall into padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    spatial = sorted(label for label in right_labels if label.isdigit())
    batch = out[out_labels.index("b")]
    features = out[out_labels.index("f")]
    contracted = right[right_labels.index("i")]
    window = _window(attributes)
    pairs = 1.0
    for position, label in enumerate(spatial):
        pairs *= _valid_pairs(
            left[left_labels.index(label)],
            right[right_labels.index(label)],
            out[out_labels.index(label)],
            *(_entry(window, key, position, default) for key, default in _WINDOW_DEFAULTS),
        )
    return 2.0 * batch * features * contracted * pairs


_WINDOW_DEFAULTS = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def _window(attributes: str) -> dict[str, list[str]]:
    match = re.search(r"window=\{([^}]*)\}", attributes)
    parts = match.group(1).split() if match else []
    return {key: value.split("x") for key, _, value in (part.partition("=") for part in parts)}


def _entry(window: Mapping[str, Sequence[str]], key: str, position: int, default: int) -> int:
    values = window.get(key)
    if values is None or position >= len(values):
        return default
    return int(values[position].split("_")[0])


@functools.lru_cache(maxsize=4096)
def _valid_pairs(
    size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, spread: int
) -> int:
    """(output, kernel) positions along one axis that meet a real input element."""
    if kernel == 1 and out * stride <= size and pad == 0 and dilate == 1:
        return out
    reach = (size - 1) * dilate
    total = 0
    step = max(1, 2**22 // max(kernel, 1))
    taps = np.arange(kernel, dtype=np.int64) * spread - pad
    for first in range(0, out, step):
        at = np.arange(first, min(out, first + step), dtype=np.int64)[:, None] * stride + taps
        total += int(((at >= 0) & (at <= reach) & (at % dilate == 0)).sum())
    return total
