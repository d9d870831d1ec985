"""Every task but causal, scored with the loss and the metrics that training evaluates with.

What a run logs as eval_* and what this gives for the files it saved are the same computation.

Knows: objectives, the reference of preference losses. Does not know: where rows come from.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from peft import PeftModel, get_peft_model

from headrace.bridge.dtypes import tensor_to_jax
from headrace.bridge.module import Layout
from headrace.config import TrainConfig
from headrace.data.labels import Labels
from headrace.data.loader import Loader
from headrace.errors import ConfigError
from headrace.evaluate.model import EvalModel
from headrace.train.evaluation import evaluate
from headrace.train.objectives import make_objective
from headrace.train.preference import WITH_REFERENCE
from headrace.train.shapes import CompiledFunction
from headrace.train.state import TrainState
from headrace.train.step import make_eval_step
from headrace.weights.adapter import load_torch_model


def score_task(
    config: TrainConfig, model: EvalModel, labels: Labels | None, loader: Loader
) -> dict[str, float]:
    """Metrics of the loader's rows, named as in docs/training.md. Compiles once a row length.

    Preference losses that compare with the model before training load it from
    config.model_name_or_path; an adapter's is its base.
    """
    objective = make_objective(config)
    objective.check_model(model.torch_model, labels)
    adapter = isinstance(model.torch_model, PeftModel)
    reference = objective.reference_values(
        model.module.layout.keys, _before_training(config, model), adapter=adapter
    )
    loss = objective.loss(model.module, trainable=frozenset(), remat="none")
    step = CompiledFunction(
        function=make_eval_step(loss, dtypes={}), name="evaluation step", batch_position=3
    )
    state = TrainState(
        step=jnp.zeros((), jnp.int32), rng=jax.random.key(0), trainable={}, opt_state=(),
        buffers=dict(model.buffers),
    )  # fmt: skip
    found = evaluate(step, state, {**model.params, **reference}, loader, objective)
    speed = ("runtime", "tokens_per_second")
    named = {name.removeprefix("eval_"): value for name, value in found.items()}
    return {name: value for name, value in named.items() if name not in speed}


def _before_training(config: TrainConfig, model: EvalModel) -> dict[str, Array]:
    """What training changed, by stored key, with its values from before; empty where unneeded."""
    if config.task != "preference" or config.preference_loss not in WITH_REFERENCE:
        return {}
    source = config.model_name_or_path
    if isinstance(model.torch_model, PeftModel):
        fresh = _fresh_adapter(config, model.torch_model)
        changed = {name for name, p in fresh.named_parameters() if p.requires_grad}
    elif source is None:
        raise ConfigError(
            f"preference_loss {config.preference_loss} compares with the model before training: "
            "set model_name_or_path to it"
        )
    elif Path(source) == Path(str(model.torch_model.name_or_path)):
        return {}  # it is that model: nothing has changed
    else:
        fresh = _load(config, source)
        changed = {name for name, _ in fresh.named_parameters()}
    values = {n: tensor_to_jax(p) for n, p in fresh.named_parameters(remove_duplicate=False)}
    keys = {k: names for k, names in model.module.layout.keys.items() if names[0] in changed}
    if not keys:
        raise ConfigError(f"{source} is another architecture than {model.torch_model.name_or_path}")
    return Layout(keys=keys, tied={}, trainable=frozenset()).stack(values)


def _fresh_adapter(config: TrainConfig, model: PeftModel) -> Any:
    """The base with the same adapter, untrained: it computes what the base computes."""
    settings: Any = copy.copy(model.peft_config["default"])
    settings.inference_mode, settings.init_lora_weights = False, True
    inner: Any = model.get_base_model()
    base = _load(config, inner.name_or_path)
    wrapped = get_peft_model(base, settings, autocast_adapter_dtype=False)
    return wrapped.get_base_model()


def _load(config: TrainConfig, source: str) -> Any:
    return load_torch_model(
        source, task=config.task, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
