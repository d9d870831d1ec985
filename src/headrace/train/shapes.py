"""Programs compiled ahead of their call, one for each batch shape, never without a word.

A `CompiledFunction` knows every shape it has compiled; a new one is an event with its cause, its
seconds and the memory the program needs, so a run can say what it compiles, and leave compile time
out of its speed. Compiling ahead (`prepare`) finds an out-of-memory before the first step.

Knows: shapes, jit, AOT compilation. Does not know: what the function computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes per device that XLA's compiled program needs."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int

    @property
    def peak(self) -> int:
        """Arguments, results and temporaries at once, counting donated memory one time."""
        return self.arguments + self.outputs + self.temporary - self.aliased


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One compilation. `cause` names the arguments whose shape is new (empty for the first)."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    seconds: float
    memory: MemoryUse | None
    cause: tuple[str, ...] = ()
    expected: bool = True

    def __str__(self) -> str:
        text = f"compiled {self.name} for {describe_shapes(self.shapes)} in {self.seconds:.1f} s"
        if self.memory is not None:
            text += f", needs {self.memory.peak / 2**30:.2f} GiB"
        if self.cause and not self.expected:
            text += f"; unplanned, because of a new shape: {'; '.join(self.cause)}"
        return text


def describe_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    """The shapes in a few words: `input_ids [1, 8, 128]`, others only where they differ."""
    parts: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        parts.setdefault(shape, []).append(name)
    return ", ".join(f"{_few(names)} {list(shape)}" for shape, names in parts.items())


def _few(names: list[str]) -> str:
    """`input_ids`, `labels/weights`, `input_ids and 5 more`."""
    first = "input_ids" if "input_ids" in names else names[0]
    return "/".join(names) if len(names) < 3 else f"{first} and {len(names) - 1} more"


def signature(tree: Any) -> Signature:
    """Path, shape and dtype of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(
        (jax.tree_util.keystr(path, simple=True, separator="."), tuple(x.shape), str(x.dtype))
        for path, x in leaves
    )


def _difference(new: Signature, known: list[Signature]) -> tuple[str, ...]:
    """What sets `new` apart from the most similar known signature."""
    if not known:
        return ()
    nearest = min(known, key=lambda old: len(set(new) ^ set(old)))
    old_leaves = {name: (shape, dtype) for name, shape, dtype in nearest}
    causes: list[str] = []
    for name, shape, dtype in new:
        before = old_leaves.pop(name, None)
        if before is None:
            causes.append(f"{name} {list(shape)} was not there before")
        elif before != (shape, dtype):
            causes.append(f"{name} {list(before[0])} {before[1]} -> {list(shape)} {dtype}")
    causes += [f"{name} is missing" for name in old_leaves]
    return tuple(causes)


def memory_use(compiled: Any) -> MemoryUse | None:
    """XLA's own account, or None on a backend that keeps none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
    )


@dataclass(kw_only=True)
class CompiledFunction:
    """`function`, compiled once for each shape of the argument at `batch_position`.

    expected_shapes: how many shapes are planned; a compilation beyond it is reported as unplanned.
    compiler_options: XLA's, for every compilation. on_compile is called with each CompileEvent.
    compile_seconds adds them up.
    """

    function: Callable[..., Any]
    name: str
    batch_position: int
    donate: tuple[int, ...] = ()
    on_compile: Callable[[CompileEvent], None] = lambda event: None
    expected_shapes: int | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    events: list[CompileEvent] = field(default_factory=list)
    _programs: dict[Signature, Any] = field(default_factory=dict)

    @property
    def compile_seconds(self) -> float:
        return sum(event.seconds for event in self.events)

    def prepare(self, *args: Any) -> CompileEvent | None:
        """Compile for these arguments (arrays or `jax.ShapeDtypeStruct`) unless already done."""
        batch_signature = signature(args[self.batch_position])
        if batch_signature in self._programs:
            return None
        start = time.perf_counter()
        jitted = jax.jit(self.function, donate_argnums=self.donate)
        options = dict(self.compiler_options) or None
        compiled = jitted.lower(*args).compile(compiler_options=options)
        planned = self.expected_shapes
        event = CompileEvent(
            name=self.name,
            shapes={name: shape for name, shape, _ in batch_signature},
            seconds=time.perf_counter() - start,
            memory=memory_use(compiled),
            cause=_difference(batch_signature, list(self._programs)),
            expected=planned is None or len(self._programs) < planned,
        )
        self._programs[batch_signature] = compiled
        self.events.append(event)
        self.on_compile(event)
        return event

    def __call__(self, *args: Any) -> Any:
        self.prepare(*args)
        return self._programs[signature(args[self.batch_position])](*args)
