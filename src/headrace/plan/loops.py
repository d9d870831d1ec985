"""How often a loop of an optimised HLO module turns.

XLA seldom writes the count down. It is found as a person would: what does the condition compare,
where does that value start, what does the body add to it? Values are followed through tuples,
copies, fusions and enclosing loops as `carried value + offset`; what cannot be written so (a bound
that depends on data, such as the number of supervised tokens) is unknown, never guessed.

Knows: HLO arithmetic on loop counters. Does not know: time, chips.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from headrace.plan.hlo import Instruction, Module

_PASS_THROUGH = ("copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier")


class _Linear(NamedTuple):
    """`offset`, or the loop's carried value number `carried` plus `offset`."""

    carried: int | None
    offset: int


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Turns of a `while`; None when its bound is a value of the run."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    condition = _named(loop, "condition")
    compared = _compared(module, condition) if condition else None
    if compared is None or loop.called is None:
        return None
    counter, bound, inclusive = compared
    if counter.carried is None:
        return None
    start = _start(module, loop, counter.carried)
    step = _step(module, loop.called, counter.carried)
    limit = bound.offset
    if bound.carried is not None:
        if not _unchanged(module, loop.called, bound.carried):
            return None
        begun = _start(module, loop, bound.carried)
        if begun is None:
            return None
        limit += begun
    if start is None or not step or step < 0:
        return None
    distance = limit + inclusive - (start + counter.offset)
    return max(0, -(-distance // step))


def _named(loop: Instruction, key: str) -> str | None:
    match = re.search(rf"\b{key}=%([\w.\-]+)", loop.attributes)
    return match.group(1) if match else None


def _root(module: Module, computation: str) -> Instruction | None:
    found = module.computations.get(computation)
    return next((i for i in found.instructions if i.is_root), None) if found else None


def _compared(module: Module, condition: str) -> tuple[_Linear, _Linear, int] | None:
    """(counter, bound, 1 for <=) of a condition that is a `<`, `<=`, or a fusion of one."""
    root = _root(module, condition)
    if root is None:
        return None
    where, values = condition, {}
    if root.op == "fusion" and root.called:
        values = _fused_values(module, condition, root, {})
        where, root = root.called, _root(module, root.called)
    if root is None or root.op != "compare" or len(root.operands) != 2:
        return None
    left, right = (_linear(module, where, name, values) for name in root.operands)
    direction = re.search(r"direction=(\w+)", root.attributes)
    if left is None or right is None or direction is None:
        return None
    match direction.group(1):
        case "LT":
            return left, right, 0
        case "LE":
            return left, right, 1
        case "GT":
            return right, left, 0
        case "GE":
            return right, left, 1
        case "NE":
            return left, right, 0
        case _:
            return None


def _fused_values(
    module: Module, where: str, fusion: Instruction, outer: dict[str, _Linear | None]
) -> dict[str, _Linear | None]:
    """What the parameters inside a fusion stand for, by their names."""
    inside = module.computations.get(fusion.called or "")
    values: dict[str, _Linear | None] = {}
    for each in inside.instructions if inside else ():
        if each.op == "parameter" and each.argument_text.isdigit():
            number = int(each.argument_text)
            if number < len(fusion.operands):
                values[each.name] = _linear(module, where, fusion.operands[number], outer)
    return values


def _linear(
    module: Module, where: str, name: str, values: dict[str, _Linear | None]
) -> _Linear | None:
    """The value of an instruction inside a loop's body or condition."""
    if name in values:
        return values[name]
    each = module.operand(where, name)
    if each is None:
        return None
    if each.op == "constant":
        return _Linear(None, int(each.argument_text)) if _is_int(each.argument_text) else None
    if each.op in _PASS_THROUGH and each.operands:
        return _linear(module, where, each.operands[0], values)
    if each.op == "get-tuple-element":
        return _element(module, where, each, values)
    if each.op in ("add", "subtract") and len(each.operands) == 2:
        left, right = (_linear(module, where, n, values) for n in each.operands)
        return _combined(left, right, 1 if each.op == "add" else -1)
    if each.op == "fusion" and each.called:
        root = _root(module, each.called)
        inner = _fused_values(module, where, each, values)
        return _linear(module, each.called, root.name, inner) if root is not None else None
    return None


def _combined(left: _Linear | None, right: _Linear | None, sign: int) -> _Linear | None:
    if left is None or right is None:
        return None
    if right.carried is None:
        return _Linear(left.carried, left.offset + sign * right.offset)
    return (
        _Linear(right.carried, left.offset + right.offset)
        if left.carried is None and sign == 1
        else None
    )


def _element(
    module: Module, where: str, each: Instruction, values: dict[str, _Linear | None]
) -> _Linear | None:
    source, index = module.operand(where, each.operands[0]), _index(each)
    if source is None:
        return None
    if source.op == "parameter":
        return _Linear(index, 0)
    if source.op == "tuple":
        return _linear(module, where, source.operands[index], values)
    if source.op == "fusion" and source.called:
        root = _root(module, source.called)
        if root is not None and root.op == "tuple" and index < len(root.operands):
            inner = _fused_values(module, where, source, values)
            return _linear(module, source.called, root.operands[index], inner)
    return None


def _index(each: Instruction) -> int:
    match = re.search(r"index=(\d+)", each.attributes)
    return int(match.group(1)) if match else 0


def _is_int(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d+", text))


def _next(module: Module, body: str, index: int) -> _Linear | None:
    """What the body hands on as carried value `index`."""
    root = _root(module, body)
    if root is None or root.op != "tuple" or index >= len(root.operands):
        return None
    return _linear(module, body, root.operands[index], {})


def _step(module: Module, body: str, index: int) -> int | None:
    """What the body adds to carried value `index`, in constants or in values it never changes."""
    root = _root(module, body)
    if root is None or root.op != "tuple" or index >= len(root.operands):
        return None
    direct = _linear(module, body, root.operands[index], {})
    if direct is not None:
        return direct.offset if direct.carried == index else None
    added = module.operand(body, root.operands[index])
    if added is None or added.op != "add":
        return None
    parts = [_linear(module, body, name, {}) for name in added.operands]
    others = [part for part in parts if part is not None and part.carried != index]
    if len(others) != 1 or others[0].carried is None:
        return None
    if not _unchanged(module, body, others[0].carried):
        return None
    caller = module.callers.get(body)
    begun = _start(module, caller[1], others[0].carried) if caller else None
    return None if begun is None else begun + others[0].offset


def _unchanged(module: Module, body: str, index: int) -> bool:
    return _next(module, body, index) == _Linear(index, 0)


def _start(module: Module, loop: Instruction, index: int) -> int | None:
    """The integer that carried value `index` has before the first turn."""
    caller = module.callers.get(loop.called or "")
    if caller is None:
        return None
    where = caller[0]
    begun = module.operand(where, loop.operands[0])
    if begun is None or begun.op != "tuple" or index >= len(begun.operands):
        return None
    value = _linear(module, where, begun.operands[index], {})
    if value is None or value.carried is None:
        return None if value is None else value.offset
    outer = module.callers.get(where)
    if outer is None or outer[1].op != "while" or not _unchanged(module, where, value.carried):
        return None
    start = _start(module, outer[1], value.carried)
    return None if start is None else start + value.offset
