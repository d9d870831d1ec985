"""Settings that a run leaves open, chosen for the devices at hand by the analytic model.

    mesh: auto                    data, fsdp or both; tensor only where nothing else fits
    auto_find_batch_size: true    the largest micro-batch that fits; accumulation makes up the rest

`activation_checkpointing: auto` is assumed here and settled later by the compiler
(`train.programs`). Only what is left open changes, and never the rows of an optimizer step.

Knows: the analytic model, the local devices. Does not know: datasets, compiling, training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.analytic import Estimate, Training, estimate, memory_by_cause, training_of
from headrace.plan.candidate import Candidate, meshes
from headrace.plan.hardware import Slice, local_slice
from headrace.plan.shape import model_shape

_SHORTEST = 128  # tokens in a row when the configuration leaves the length to the data
_ROOM = 0.9  # of a device's memory: the analytic model is within about 15 %
_POLICIES = ("none", "dots", "full")  # from fastest to leanest


@dataclass(frozen=True, kw_only=True)
class Here:
    """Devices of this run. memory: bytes of one, None where it is not limited (CPU). hardware:
    None for devices that the planner does not know."""

    count: int
    memory: int | None = None
    hardware: Slice | None = None

    @classmethod
    def look(cls) -> Here:
        """The devices that JAX has."""
        import jax

        from headrace.sharding import device_memory

        devices, memory = jax.devices(), device_memory()
        return cls(
            count=len(devices),
            memory=None if memory is None else memory.limit,
            hardware=local_slice(devices[0].device_kind, len(devices)),
        )


def automatic_settings(
    config: TrainConfig, model_config: Mapping[str, Any], here: Here
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The configuration with `mesh: auto` and `auto_find_batch_size` settled, and a line for each.

    model_config: a config.json. What fits is what the analytic model puts below nine tenths of
    `here.memory`; among that the fastest by the same model on known hardware, else the largest
    micro-batch with the least recomputation. When nothing fits the leanest is taken, and the check
    before loading, or the compiler, says so. Milliseconds.
    """
    open_mesh = config.mesh == "auto"
    if not open_mesh and not config.auto_find_batch_size:
        return config, ()
    training = training_of(config, model_shape(model_config, config.model_name_or_path or "model"))
    found = _choose(config, training, here)
    changed: dict[str, Any] = {}
    notes: list[str] = []
    if open_mesh and here.count > 1:
        changed["mesh"] = {name: size for name, size in found.mesh.items() if size > 1}
        notes.append(f"mesh: auto -> {found.mesh_text()}")
    if config.auto_find_batch_size:
        changed["auto_find_batch_size"] = False
        changed["per_device_train_batch_size"] = found.batch_size
        changed["gradient_accumulation_steps"] = found.accumulation
        notes.append(
            f"auto_find_batch_size -> per_device_train_batch_size {found.batch_size}, "
            f"gradient_accumulation_steps {found.accumulation}"
        )
    return config.replace(**changed), tuple(notes)


def local_candidate(config: TrainConfig, here: Here, *, length: int | None = None) -> Candidate:
    """A settled configuration as a candidate. length: tokens in a row, `max_length` by default."""
    mesh: Any = {"fsdp": here.count} if config.mesh == "auto" else config.mesh
    remat = config.activation_checkpointing
    return Candidate(
        slice_name="here" if here.hardware is None else here.hardware.name,
        mesh=dict(mesh or {}),
        batch_size=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        length=length or config.max_length or _SHORTEST,
        packing=config.packing,
        remat="full" if remat == "auto" else remat,
        flags=config.compiler_flags,
    )


def planned_step(
    config: TrainConfig, model_config: Mapping[str, Any], here: Here, *, length: int
) -> Estimate | None:
    """What the analytic model says of a settled run's step with rows of `length` tokens, to be held
    against what it takes; None on devices that the planner does not know, or an unknown model.
    """
    if here.hardware is None:
        return None
    try:
        shape = model_shape(model_config, config.model_name_or_path or "model")
    except ConfigError:
        return None
    return estimate(training_of(config, shape), local_candidate(config, here, length=length))


def least_remat(training: Training, candidate: Candidate, here: Here) -> str:
    """The policy that recomputes least and fits; the leanest when none fits."""
    fitting = (p for p in _POLICIES if _fits(training, candidate.but(remat=p), here))
    return next(fitting, _POLICIES[-1])


def _choose(config: TrainConfig, training: Training, here: Here) -> Candidate:
    for tensor in (False, True):
        tried = list(_candidates(config, training, here, tensor=tensor))
        fitting = [c for c in tried if _fits(training, c, here)]
        if fitting and here.hardware is not None:
            return min(fitting, key=lambda c: estimate(training, c).seconds / c.step_positions)
        if fitting:
            return fitting[0]
        if config.mesh != "auto" or here.count == 1:
            break
    tried = list(_candidates(config, training, here, tensor=False))
    return min(tried, key=lambda c: sum(memory_by_cause(training, c).values()))


def _candidates(
    config: TrainConfig, training: Training, here: Here, *, tensor: bool
) -> Iterator[Candidate]:
    """Preferred ones first."""
    plain = local_candidate(config, here)
    remat = config.activation_checkpointing
    for mesh in _meshes(config, training, here, tensor=tensor):
        for batch, accumulation in _splits(config):
            for policy in _POLICIES if remat == "auto" else (remat,):
                yield plain.but(
                    mesh=mesh, batch_size=batch, accumulation=accumulation, remat=policy
                )


def _meshes(
    config: TrainConfig, training: Training, here: Here, *, tensor: bool
) -> list[dict[str, int]]:
    if config.mesh != "auto":
        given: Any = config.mesh
        return [dict(given or {})]
    if here.hardware is None:
        return [{"fsdp": here.count} if here.count > 1 else {}]
    heads = min(kind.heads for kind in training.shape.layers)
    kv_heads = min(kind.kv_heads for kind in training.shape.layers)
    found = meshes(here.hardware, heads=heads, kv_heads=kv_heads)
    return [mesh for mesh in found if (mesh.get("tensor", 1) > 1) == tensor]


def _splits(config: TrainConfig) -> Iterator[tuple[int, int]]:
    """(rows of a micro-batch, accumulation), the rows of a step unchanged, large ones first."""
    rows, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    yield rows, accumulation
    while config.auto_find_batch_size and rows % 2 == 0:
        rows, accumulation = rows // 2, accumulation * 2
        yield rows, accumulation


def _fits(training: Training, candidate: Candidate, here: Here) -> bool:
    if here.memory is None:
        return True
    return sum(memory_by_cause(training, candidate).values()) <= _ROOM * here.memory


__all__ = ["Here", "automatic_settings", "least_remat", "local_candidate", "planned_step"]
