"""Sizes that depend on values, while a model is traced: loops over `nonzero`, `if size == 0`.

`nonzero`, `torch.where(mask)` and `x[mask]` give tensors whose size is a symbol of the exporter
(u0). They stay so in the graph; `passes/bounded.py` gives them their largest size and proves that
the rest does no harm. Two things must be answered before there is a graph:

- `for e in hit.nonzero():` runs once for every place of `hit`. What such a turn selects is selected
  from `mask & hit[e]`, so a turn of a place that is not hit writes nothing. Markers in the graph
  (`headrace::turn`) say where a turn begins and ends: the pass proves that nothing else leaves it.
- `if index.numel() == 0: continue` inside a turn goes on, for the same reason. Elsewhere the
  question is answered as for a size that is not 0, and `headrace::require` asks it again when the
  program runs.

Does not know: JAX.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from headrace.errors import CaptureError


@torch.library.custom_op("headrace::turn", mutates_args=())
def turn_op(hit: Tensor, number: int, begins: bool) -> Tensor:
    """`hit`, a boolean; marks where turn `number` of a loop over `nonzero` begins or ends."""
    return hit.clone()


@turn_op.register_fake
def _(hit: Tensor, number: int, begins: bool) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(hit)


@torch.library.custom_op("headrace::require", mutates_args=())
def require_op(holds: Tensor, why: str) -> Tensor:
    """`holds`, a boolean that must be true wherever the program runs; `why` is the message."""
    return holds.clone()


@require_op.register_fake
def _(holds: Tensor, why: str) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(holds)


has_side_effect(torch.ops.headrace.turn.default)
has_side_effect(torch.ops.headrace.require.default)


@contextlib.contextmanager
def bounded_sizes(notes: list[str]) -> Generator[None]:
    """While this is open, loops over `nonzero` and questions about its size are answered."""
    mode = _Selections(notes)
    iterate = Tensor.__iter__

    def iter_(self: Tensor) -> Any:
        return mode.turns(self, sys._getframe(1)) or iterate(self)  # pyright: ignore[reportPrivateUsage]

    Tensor.__iter__ = iter_
    try:
        with answered_sizes(mode.asked), mode:
            yield
    finally:
        Tensor.__iter__ = iterate


@contextlib.contextmanager
def answered_sizes(
    asked: Callable[[set[sympy.Symbol], FrameType, bool], bool] | None = None,
) -> Generator[None]:
    """While this is open, a size that depends on values counts as neither 0 nor 1.

    asked: whether a question of the model's own may be answered so; torch's own always are, since
    the program has the largest size.
    """
    evaluate = ShapeEnv.evaluate_expr

    @functools.wraps(evaluate)
    def evaluate_expr(env: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(env, expression, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            open_ = set(free_unbacked_symbols(expression))
            answer = _answer(expression) if open_ <= set(env.size_like) else None
            frame = _asking_frame()
            if answer is None or (frame is not None and asked is None):
                raise
            if frame is not None and asked is not None and not asked(open_, frame, bool(answer)):
                raise
            return answer

    ShapeEnv.evaluate_expr = evaluate_expr  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = evaluate


def _answer(expression: Any) -> Any:
    if not _is_about_nothing(expression):
        return None
    value = expression.subs(dict.fromkeys(expression.free_symbols, sympy.Integer(1009)))
    return value if value in (sympy.true, sympy.false) else None


_SELECTIONS: tuple[Any, ...] = (torch.nonzero, Tensor.nonzero, torch.where)
_READS: tuple[Any, ...] = (Tensor.__getitem__,)
_ROWS: tuple[Any, ...] = (torch.select, Tensor.select)
_WRITES: tuple[Any, ...] = (Tensor.__setitem__,)


class _Selections(TorchFunctionMode):
    """Knows which mask every symbolic size comes from, and the gate of the open turns."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes
        self._masks: dict[sympy.Symbol, Tensor] = {}
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}  # id of an index list -> (it, its mask)
        self._gates: list[Tensor] = []
        self._gated: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._selected: list[Tensor] = []  # by the open turns
        self._turns = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__format__ and args[0].ndim == 0:
            return format(args[0].item(), *args[1:])  # f"expert_{index}"
        if self._gates and func in _ROWS and not kwargs:
            return func(*_inside(args))
        if func in _SELECTIONS and len(args) + len(kwargs.keys() - {"as_tuple", "out"}) == 1:
            mask = self._gate(args[0] if args else next(iter(kwargs.values())))
            kept = {k: v for k, v in kwargs.items() if k == "as_tuple"}
            return self._note(mask, func(mask, **kept))
        if func in _READS or func in _WRITES:
            mask = _only_mask(args[1])
            if mask is not None:
                gated = self._gate(mask)
                result = func(args[0], gated, *args[2:])
                return self._note(gated, result) if func in _READS else result
        return func(*args, **kwargs)

    def _note(self, mask: Tensor, result: Any) -> Any:
        for part in result if isinstance(result, (tuple, list)) else (result,):
            size = part.shape[0] if part.ndim else 0
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                self._masks[size.node.expr] = mask
            if self._gates:
                self._selected.append(mask)
            self._lists[id(part)] = (part, mask)
        return result

    def _gate(self, mask: Tensor) -> Tensor:
        """The mask, and all of nothing where the open turns are of places that are not hit."""
        for gate in self._gates:
            key = (id(mask), id(gate))
            if key not in self._gated:
                self._gated[key] = (mask, torch.logical_and(mask, gate))
            mask = self._gated[key][1]
        return mask

    def turns(self, tensor: Tensor, frame: FrameType) -> Iterator[Tensor] | None:
        """The turns of `for e in tensor` when `tensor` is `nonzero` of a mask of one dimension."""
        known = self._lists.get(id(tensor))
        if known is None or known[1].ndim != 1 or _is_fixed(tensor) or not _is_fixed(known[1]):
            return None
        problem = _loop_problem(frame.f_code, frame.f_lineno)
        if problem:
            raise CaptureError(
                f"{frame.f_code.co_filename}:{frame.f_lineno} loops over the places where a mask "
                f"is true, and {problem}.\nNeeded: a loop that only adds or writes rows that it "
                "selects with masks."
            )
        return self._run(tensor, known[1])

    def _run(self, tensor: Tensor, mask: Tensor) -> Iterator[Tensor]:
        for place in range(int(mask.shape[0])):
            hit = mask.select(0, place) != 0
            self._turns += 1
            number = self._turns
            gates, selected = len(self._gates), len(self._selected)
            self._gates.append(torch.ops.headrace.turn(hit, number, True))
            row = torch.tensor([place], dtype=torch.int64)
            yield row if tensor.ndim == 2 else row[0]
            del self._gates[gates:], self._selected[selected:]
            torch.ops.headrace.turn(hit, number, False)

    def asked(self, sizes: set[sympy.Symbol], frame: FrameType, answer: bool) -> bool:
        """Whether the model may ask: freely in a turn, which then selects nothing; else checked.

        A turn that asks about one mask may not write the rows that it selected with another before.
        """
        if not sizes <= self._masks.keys():
            return False
        if not self._gates:
            self._require(sizes, frame)
            return True
        masks = [self._masks[s] for s in sizes]
        others = [m for m in self._selected if not any(m is own for own in masks)]
        if others or not _skips_only(frame.f_code, frame.f_lineno, answer):
            raise CaptureError(
                f"{frame.f_code.co_filename}:{frame.f_lineno} asks in a loop over the places of a "
                "mask whether another mask selects anything, and does more than go on to the next "
                "place, or has selected with a third one before.\n"
                "Needed: `if index.numel() == 0: continue` right behind the selection."
            )
        self._gates += [mask.ne(0).any() for mask in masks]
        return True

    def _require(self, sizes: set[sympy.Symbol], frame: FrameType) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        why = f"{where} asks whether a mask selects anything; the program is for masks that do"
        for symbol in sizes:
            torch.ops.headrace.require(self._masks[symbol].ne(0).any(), why)
        if why not in self._notes:
            self._notes.append(why + ", and checks it")


def _is_fixed(tensor: Tensor) -> bool:
    return not isinstance(tensor.shape[0], torch.SymInt)  # pyright: ignore[reportUnnecessaryIsInstance]


def _inside(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A turn of a place past the end (a class for padding) is never hit: it may read any row."""
    tensor, *rest = args
    dim, index = rest
    if type(index) is not int or not isinstance(tensor.shape[dim], int):
        return args
    return (tensor, *rest[:-1], min(index, tensor.shape[dim] - 1))


def _only_mask(index: Any) -> Tensor | None:
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    return index if isinstance(index, Tensor) and index.dtype is torch.bool and index.ndim else None


def _is_about_nothing(expression: Any) -> bool:
    """A comparison of a multiple of sizes with 0 or 1."""
    if isinstance(expression, sympy.Not):
        return _is_about_nothing(expression.args[0])
    return isinstance(expression, sympy.core.relational.Relational) and any(
        side in (0, 1) for side in expression.args
    )


_OWN = __file__
_ASKING = ("symbolic_shapes.py", "sym_node.py", "recording.py", "torch/__init__.py", "functools.py")


def _asking_frame() -> FrameType | None:
    """The model's frame that turned a comparison of sizes into a bool; None: torch itself asks."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name != _OWN and not name.endswith(_ASKING):
            return None if name.startswith(_TORCH) else frame
        frame = frame.f_back
    return None


_TORCH = torch.__path__[0]


@functools.cache
def _loop_problem(code: CodeType, line: int) -> str:
    """Why the `for` at this line cannot run for places that are not hit; "" when it can."""
    try:
        tree = _tree(code)
    except OSError:
        return "its source cannot be read"
    loops = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.For) and n.iter.lineno <= line <= (n.iter.end_lineno or 0)
    ]
    if len(loops) != 1 or _wraps(loops[0].iter):
        return "counts them or keeps them in a list"
    return _body_problem(tree, loops[0])


@functools.cache
def _skips_only(code: CodeType, line: int, answer: bool) -> bool:
    """Whether the `if` at this line does nothing in the other case but go on to the next turn."""
    found = [
        n
        for n in ast.walk(_tree(code))
        if isinstance(n, ast.If) and n.test.lineno <= line <= (n.test.end_lineno or 0)
    ]
    if len(found) != 1 or found[0].orelse or not isinstance(found[0].test, ast.Compare):
        return False
    return answer or [type(n) for n in found[0].body] == [ast.Continue]


def _tree(code: CodeType) -> ast.AST:
    lines, first = inspect.getsourcelines(code)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    return ast.increment_lineno(tree, first - 1)


def _wraps(iterable: ast.expr) -> bool:
    return isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name)


def _body_problem(tree: ast.AST, loop: ast.For) -> str:
    inside = [n for statement in loop.body for n in ast.walk(statement)]
    leaving = next((n for n in inside if isinstance(n, (ast.Break, ast.Return, ast.Yield))), None)
    if leaving is not None or loop.orelse:
        return "leaves the loop early"
    targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    changed = [n for n in inside if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)]
    if changed:
        return f"counts in {changed[0].target.id}"  # pyright: ignore[reportAttributeAccessIssue]
    first = {}
    for node in sorted(_names(inside), key=_order):
        first.setdefault(node.id, node)
    carried = {
        name
        for name, node in first.items()
        if isinstance(node.ctx, ast.Load)
        and name not in targets
        and any(n.id == name and isinstance(n.ctx, ast.Store) for n in _names(inside))
    }
    stored = {n.id for n in _names(inside) if isinstance(n.ctx, ast.Store)}
    after = {
        n.id
        for n in _names(ast.walk(tree))
        if isinstance(n.ctx, ast.Load) and n.lineno > (loop.end_lineno or 0)
    }
    carried |= stored & after
    return f"takes {', '.join(sorted(carried))} from one turn to the next" if carried else ""


def _names(nodes: Any) -> list[ast.Name]:
    return [n for n in nodes if isinstance(n, ast.Name)]


def _order(node: ast.Name) -> tuple[int, int, int]:
    # In `x = f(x)` the right side is read first although it stands later.
    return node.lineno, int(isinstance(node.ctx, ast.Store)), node.col_offset


__all__ = ["bounded_sizes"]
