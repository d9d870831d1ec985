"""A run that cannot fit the devices at hand, told apart before anything is loaded.

Only what is far beyond the memory is refused: the analytic model is within about 15 %, and the
compiler has the last word on the rest (`Programs.prepare_largest`).

Knows: the analytic memory model, the local devices. Does not know: datasets, compiling.
"""

from __future__ import annotations

from typing import Any

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.analytic import memory_by_cause, training_of
from headrace.plan.candidate import Candidate
from headrace.plan.shape import model_shape, read_model_config

MARGIN = 1.25
_SHORTEST = 128  # tokens in a row when the configuration leaves the length to the data


def device_budget() -> tuple[int, int] | None:
    """(devices, bytes of one) that a run here would use; None where memory is not limited."""
    import jax

    devices = jax.devices()
    stats: Any = devices[0].memory_stats()
    limit = (stats or {}).get("bytes_limit")
    return (len(devices), int(limit)) if limit else None


def check_fits(config: TrainConfig) -> None:
    """Raise ConfigError when the run needs far more memory than the devices here have.

    A second's work; a model without a readable config.json, and machines without a memory limit
    (CPU), pass.
    """
    if config.model_name_or_path is None:
        return
    try:
        found = read_model_config(config.model_name_or_path, config.model_revision)
        shape = model_shape(found, config.model_name_or_path)
    except ConfigError:
        return  # the run itself says what is wrong with the model
    budget = device_budget()
    if budget is None:
        return
    candidate = _candidate(config, budget[0])
    memory = memory_by_cause(training_of(config, shape), candidate)
    needed = sum(memory.values())
    if needed > MARGIN * budget[1]:
        raise ConfigError(_refusal(config, shape.name, memory, needed, *budget))


def _candidate(config: TrainConfig, num_devices: int) -> Candidate:
    mesh: Any = config.mesh
    if mesh == "auto":
        mesh = {"fsdp": num_devices}
    remat = config.activation_checkpointing
    return Candidate(
        slice_name="here",
        mesh=dict(mesh or {}),
        batch_size=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        length=config.max_length or _SHORTEST,
        packing=config.packing,
        remat="full" if remat == "auto" else remat,
    )


def _refusal(
    config: TrainConfig, name: str, memory: dict[str, int], needed: int, devices: int, limit: int
) -> str:
    causes = sorted(memory.items(), key=lambda entry: -entry[1])[:4]
    parts = ", ".join(f"{cause} {size / 2**30:.1f}" for cause, size in causes)
    advice = ["lower per_device_train_batch_size or max_length"]
    if devices > 1 and not config.mesh:
        advice.insert(0, f"set mesh: auto to use all {devices} devices")
    if config.activation_checkpointing not in ("full", "auto"):
        advice.append("set activation_checkpointing: full")
    if not config.use_peft:
        advice.append("train an adapter (use_peft: true)")
    return (
        f"{name} needs about {needed / 2**30:.1f} GiB a device, a device here has "
        f"{limit / 2**30:.1f}.\n  GiB: {parts}\n  To make it fit: {'; '.join(advice)}; or look "
        "for a slice with `headrace plan --search`. Nothing was loaded."
    )
