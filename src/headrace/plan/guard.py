"""A run that cannot fit the devices at hand, told apart before anything is loaded.

Only what is far beyond the memory is refused: the analytic model is within about 15 %, and the
compiler has the last word on the rest (`Programs.prepare_largest`).

Knows: the analytic memory model, the local devices. Does not know: datasets, compiling.
"""

from __future__ import annotations

from headrace.config import TrainConfig
from headrace.errors import ConfigError
from headrace.plan.analytic import memory_by_cause, training_of
from headrace.plan.automatic import Here, automatic_settings, local_candidate
from headrace.plan.shape import model_shape, read_model_config

MARGIN = 1.25


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
    here = Here.look()
    if here.memory is None:
        return
    config, _ = automatic_settings(config, found, here)
    memory = memory_by_cause(training_of(config, shape), local_candidate(config, here))
    needed = sum(memory.values())
    if needed > MARGIN * here.memory:
        raise ConfigError(_refusal(config, shape.name, memory, needed, here.count, here.memory))


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
    elif config.quantization is None:
        advice.append("store its frozen weights in 4 bits (quantization: nf4)")
    return (
        f"{name} needs about {needed / 2**30:.1f} GiB a device, a device here has "
        f"{limit / 2**30:.1f}.\n  GiB: {parts}\n  To make it fit: {'; '.join(advice)}; or look "
        "for a slice with `headrace plan --search`. Nothing was loaded."
    )
