"""What to change when a plan does not fit: the smallest changes first.

Knows: candidates, the analytic model corrected by the compiled total. Does not compile.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.plan.analytic import estimate
from headrace.plan.candidate import Candidate
from headrace.plan.hardware import all_slices
from headrace.plan.planner import Change, Plan

_ORDER = {"none": ("dots", "full"), "dots": ("full",), "attention": ("full",)}
MOST = 3
_ROOM = 0.97  # of the memory; what is left absorbs the analytic model's error


def smallest_changes(plan: Plan) -> list[Change]:
    """Up to three changes that should fit, from the one that costs least; none when it fits."""
    if plan.fits:
        return []
    scale = max(1.0, plan.hbm_bytes / max(plan.estimate.hbm_bytes, 1)) if plan.compiled else 1.0
    found: list[Change] = []
    for text, candidate in _changes(plan):
        needed = int(scale * estimate(plan.subject.training, candidate).hbm_bytes)
        if needed <= _ROOM * candidate.hardware.chip.hbm_bytes:
            found.append(Change(text=text, candidate=candidate, hbm_bytes=needed))
        if len(found) == MOST:
            break
    return found


def _changes(plan: Plan) -> Iterator[tuple[str, Candidate]]:
    each = plan.candidate
    if not each.trains:
        yield from _for_evaluation(plan)
        return
    for policy in _ORDER.get(each.remat, ()):
        yield f"activation_checkpointing: {policy}", each.but(remat=policy)
    lean = each.but(remat="full") if each.remat in _ORDER else each
    also = ", activation_checkpointing: full" if lean != each else ""
    batch, accumulation = lean.batch_size, lean.accumulation
    while batch > 1:
        # the same rows in a step, fewer at a time
        accumulation = accumulation * batch // max(1, batch // 2)
        batch = max(1, batch // 2)
        text = f"per_device_train_batch_size: {batch}, gradient_accumulation_steps: {accumulation}"
        yield text + also, lean.but(batch_size=batch, accumulation=accumulation)
    if lean.axis("data") > 1:
        mesh = {**lean.mesh, "data": 1, "fsdp": lean.axis("fsdp") * lean.axis("data")}
        yield f"mesh: {{fsdp: {mesh['fsdp']}}}{also}", lean.but(mesh=mesh)
    small = lean.but(batch_size=1, accumulation=accumulation)
    length = lean.length // 2
    while length >= 256:
        yield (
            f"max_length: {length}, per_device_train_batch_size: 1{also}",
            small.but(length=length),
        )
        length //= 2
    yield from _larger_slices(plan, lean, also)


def _for_evaluation(plan: Plan) -> Iterator[tuple[str, Candidate]]:
    each = plan.candidate
    batch = each.batch_size // 2
    while batch >= 1:
        yield f"per_device_eval_batch_size: {batch}", each.but(batch_size=batch)
        batch //= 2
    yield from _larger_slices(plan, each.but(batch_size=1), "")


def _larger_slices(plan: Plan, lean: Candidate, also: str) -> Iterator[tuple[str, Candidate]]:
    hardware = plan.hardware
    others = [s for s in all_slices().values() if s.chip.kind == hardware.chip.kind]
    same = [s for s in others if s.chip is hardware.chip and s.num_chips > hardware.num_chips]
    roomier = [
        s
        for s in others
        if s.chip.hbm_bytes > hardware.chip.hbm_bytes and s.num_chips == hardware.num_chips
    ]
    for each in [*same[:3], *roomier]:
        mesh = {"fsdp": each.num_devices} if each.num_devices > 1 else {}
        yield f"--slice {each.name}{also}", lean.but(slice_name=each.name, mesh=mesh)
