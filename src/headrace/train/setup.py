"""Everything a run is made of, built before the first step, in one order.

tokenizer -> data -> model -> adapter -> capture -> loss, optimizer, schedule, state

Knows: how the parts fit. Does not know: the loop, files of the run, callbacks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from peft import PeftConfig, PeftModel, TaskType
from torch import nn

from headrace.bridge.module import JaxModule, to_jax
from headrace.config import TrainConfig, peft_config
from headrace.data.batches import Rows, fingerprint
from headrace.data.chat import chat_template
from headrace.data.growing import PieceLoader
from headrace.data.labels import label_names
from headrace.data.load import TrainingData, load_data
from headrace.data.loader import Loader
from headrace.errors import ConfigError, DataError
from headrace.plan.automatic import Here, automatic_settings
from headrace.plan.shape import read_model_config
from headrace.train.averaging import with_average
from headrace.train.lora import AdapterReport, apply_lora, serving_notes
from headrace.train.losses import Loss
from headrace.train.noise import add_embedding_noise
from headrace.train.objectives import Objective, explained, make_objective
from headrace.train.optimizers import Optimizer, decay_keys, decay_parameter_names, make_optimizer
from headrace.train.placement import Placement, host_value
from headrace.train.preference import REFERENCE
from headrace.train.schedules import Schedule, make_schedule
from headrace.train.state import Params, TrainState
from headrace.train.streaming import can_stream, start_adapter, structure
from headrace.weights.files import refuse_gguf

# Settings that say what is computed; a checkpoint of a run where one differs is refused.
_IDENTITY = (
    "task", "seed", "data_seed", "max_length", "packing", "per_device_train_batch_size",
    "gradient_accumulation_steps", "optim", "use_peft", "preference_loss", "mlm_probability",
    "ema_decay", "quantization",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """The fixed half of a run; its arrays that change are a TrainState beside it.

    loss_for: the loss under a remat policy. identity: what a checkpoint must share.
    """

    config: TrainConfig
    objective: Objective
    data: TrainingData
    model: Any
    adapter: AdapterReport | None
    processing_class: Any
    module: JaxModule
    loss_for: Callable[[str], Loss]
    optimizer: Optimizer
    schedule: Schedule
    dtypes: Mapping[str, jnp.dtype]
    frozen: Params
    num_trainable: int
    train_loader: Loader | PieceLoader
    total_steps: int
    identity: Mapping[str, Any]
    placement: Placement = field(default_factory=Placement)
    notes: tuple[str, ...] = ()

    @property
    def num_frozen(self) -> int:
        return sum(v.size for k, v in self.frozen.items() if not k.startswith(REFERENCE))

    def with_eval_dataset(self, rows: Any) -> TrainingData:
        """The data with other evaluation rows, tokenised as the run's own."""
        data = load_data(
            self.config.replace(max_length=self.data.train.report.max_length),
            self.processing_class,
            train_dataset=rows,
            eval_dataset=rows,
            label_names=None if self.data.labels is None else self.data.labels.names,
        )
        return replace(self.data, eval=data.eval)


def build_run(
    config: TrainConfig,
    *,
    model: str | nn.Module | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    adapter_config: PeftConfig | None = None,
) -> tuple[Run, TrainState]:
    """Load, check and capture: the run and the state it starts from.

    Raises the error kind of whatever does not fit; trains nothing.
    """
    if isinstance(model, str):
        config = config.replace(model_name_or_path=model)
        model = None
    if model is None and config.model_name_or_path is not None:
        refuse_gguf(config.model_name_or_path)
    config, notes = _settled(config, model)
    placement = Placement.make(config.mesh)
    objective = make_objective(config)
    tokenizer = load_processing_class(config, processing_class, model)
    data = load_data(
        config,
        tokenizer,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        model_max_length=_max_positions(config, model),
        label_names=label_names(model),
    )
    torch.manual_seed(config.seed)  # new heads and adapters start the same in every run
    torch_model: Any = model
    folder: Path | None = None
    streamed = can_stream(config, objective, placement)
    wanted = adapter_config or peft_config(config)
    _check_quantization(config, given=model is not None, streamed=streamed, adapter=wanted)
    if model is None and streamed:
        torch_model, folder = structure(config, objective)
    elif model is None:
        torch_model, said = objective.load_model(config, data.labels)
        notes += said
    objective.check_model(torch_model, data.labels)
    _check_vocabulary(torch_model, data.train.rows)
    if data.train.growing is not None:
        data.train.growing.check = partial(_check_vocabulary, torch_model)
    _set_pad_token(torch_model, tokenizer)
    notes += _set_stop_token(torch_model, tokenizer, data.train.rows)
    report: AdapterReport | None = None
    if wanted is not None:
        torch.manual_seed(config.seed)  # however the weights came: an adapter starts the same
        torch_model, report = apply_lora(torch_model, wanted, task_type=objective.task_type)
        start_adapter(torch_model)
        if objective.task_type == TaskType.CAUSAL_LM:
            notes += serving_notes(torch_model.peft_config["default"])
    notes += _untrained_tokens(torch_model, tokenizer, data.train.rows)
    # PEFT's wrapper only forwards, through **kwargs that hide the inputs' names: capture what it
    # holds, the base model with LoRA layers in it.
    core = torch_model.get_base_model() if isinstance(torch_model, PeftModel) else torch_model
    masters = _cast_model(core, config)
    core.train()
    if config.neftune_noise_alpha is not None:
        add_embedding_noise(core, config.neftune_noise_alpha)
    module = to_jax(core, _example_inputs(data.train.rows, objective), cache_dir=_captures(config))
    placement, module = placement.planned(module, config.sharding_overrides)
    placement = placement.quantizing(module, config.quantization)
    run, state = _assemble(
        config, objective, data, torch_model, report, tokenizer, module, masters, placement, folder
    )
    return replace(run, notes=(*notes, *placement.notes)), state


def _settled(config: TrainConfig, model: Any) -> tuple[TrainConfig, list[str]]:
    """What the configuration leaves to the devices (`mesh: auto`, micro-batches), chosen."""
    found = model.config.to_dict() if hasattr(model, "config") else None
    try:
        if found is None and config.model_name_or_path is not None and model is None:
            found = read_model_config(config.model_name_or_path, config.model_revision)
        if found is not None:
            config, notes = automatic_settings(config, found, Here.look())
            return config, list(notes)
    except ConfigError as error:
        if config.auto_find_batch_size:
            return config, [f"auto_find_batch_size has no effect: {error}"]
    return config, []


def _check_quantization(
    config: TrainConfig, *, given: bool, streamed: bool, adapter: PeftConfig | None
) -> None:
    problems: list[str] = []
    if config.quantization and given:
        problems.append("it reads the model's own files: set model_name_or_path, no model object")
    if config.quantization and not streamed:
        problems.append(f"task {config.task} gives the model a new head, and PyTorch loads it")
    if config.quantization and adapter is None:
        problems.append("it is for frozen weights: set use_peft: true, or give peft_config")
    elif config.quantization and getattr(adapter, "use_dora", False):
        problems.append("DoRA starts from whole base weights: use plain LoRA")
    if problems:
        raise ConfigError(f"quantization: {config.quantization} cannot be: {'; '.join(problems)}")


def _captures(config: TrainConfig) -> Path | None:
    """Where captures are kept: beside the compiled programs."""
    folder = config.compilation_cache_dir
    return None if folder is None else Path(folder) / "captures"


def _assemble(
    config: TrainConfig,
    objective: Objective,
    data: TrainingData,
    model: Any,
    report: AdapterReport | None,
    tokenizer: Any,
    module: JaxModule,
    masters: Mapping[str, np.ndarray],
    placement: Placement,
    folder: Path | None,
) -> tuple[Run, TrainState]:
    layout = module.layout
    loader = data.train_loader(config, num_devices=placement.rows, process=placement.process)
    placement.check_shapes(loader.shapes)
    total = num_steps(config, loader.steps_per_epoch)
    decay = decay_keys(
        layout.trainable,
        layout_keys=layout.keys,
        decay_names=decay_parameter_names(module.module),
    )
    optimizer = make_optimizer(
        config.optim,
        stacked=frozenset(key for key, names in layout.keys.items() if len(names) > 1),
        decay=decay,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
    )
    if config.ema_decay is not None:
        optimizer = with_average(optimizer, config.ema_decay)
    params = placement.params(module, folder)
    dtypes = placement.compute_dtypes(params, layout.trainable)
    params |= _stored_masters(module, masters, placement)
    reference = objective.reference_values(
        layout.keys, {key: params[key].astype(dtypes[key]) for key in layout.trainable},
        adapter=isinstance(model, PeftModel),
    )  # fmt: skip
    state, frozen = placement.state(
        params, module.buffers(), trainable=layout.trainable, optimizer=optimizer, seed=config.seed
    )
    frozen |= reference
    run = Run(
        config=config,
        objective=objective,
        data=data,
        model=model,
        adapter=report,
        processing_class=tokenizer,
        module=module,
        loss_for=lambda remat: objective.loss(module, trainable=layout.trainable, remat=remat),
        optimizer=optimizer,
        schedule=make_schedule(
            config.lr_scheduler_type,
            learning_rate=config.learning_rate,
            num_training_steps=total,
            num_warmup_steps=config.num_warmup_steps(total),
            **_schedule_options(config),
        ),
        dtypes=dtypes,
        frozen=frozen,
        num_trainable=sum(value.size for value in state.trainable.values()),
        train_loader=loader,
        total_steps=total,
        identity=run_identity(config, data.train.rows, state, frozen, rows=placement.rows)
        | ({"prepared": "while training"} if data.train.growing is not None else {}),
        placement=placement,
    )
    return run, state


def _schedule_options(config: TrainConfig) -> dict[str, Any]:
    """lr_scheduler_kwargs; a plateau is watched in the direction of the best metric."""
    options = dict(config.lr_scheduler_kwargs)
    if config.lr_scheduler_type == "reduce_lr_on_plateau":
        options.setdefault("mode", "max" if config.greater_is_better else "min")
    return options


def restart(run: Run, state: TrainState) -> TrainState:
    """The weights of `state` with a fresh optimizer, at step 0."""
    return TrainState(
        step=jnp.zeros_like(state.step),
        rng=state.rng,
        trainable=state.trainable,
        opt_state=run.optimizer.init(state.trainable),
        buffers=state.buffers,
    )


def num_steps(config: TrainConfig, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the run. Rows that are still prepared have no epoch: max_steps says it."""
    if config.max_steps > 0:
        return config.max_steps
    assert steps_per_epoch is not None
    return max(1, math.ceil(config.num_train_epochs * steps_per_epoch))


def load_processing_class(config: TrainConfig, given: Any, model: Any) -> Any:
    """The tokenizer: the one given, the config's, or the model's own."""
    if given is not None and not isinstance(given, str):
        return given
    own = getattr(getattr(model, "config", None), "_name_or_path", None)
    name = given or config.processing_class or config.model_name_or_path or own
    if not name:
        raise ConfigError(
            "no tokenizer: the model was given as an object without a name. Pass processing_class."
        )
    from transformers import AutoTokenizer

    setting = "processing_class" if given or config.processing_class else "model_name_or_path"
    with explained(str(name), setting, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            name, revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )


def _max_positions(config: TrainConfig, model: Any) -> int | None:
    found: Any = getattr(model, "config", None)
    if model is None:
        if config.model_name_or_path is None:
            raise ConfigError("no model: set model_name_or_path, or pass model.")
        from transformers import AutoConfig

        with explained(config.model_name_or_path, "model_name_or_path", "model"):
            found = AutoConfig.from_pretrained(
                config.model_name_or_path,
                revision=config.model_revision,
                trust_remote_code=config.trust_remote_code,
            )
    text = found.get_text_config() if hasattr(found, "get_text_config") else found
    return getattr(text, "max_position_embeddings", None)


def _check_vocabulary(model: Any, rows: Rows) -> None:
    """XLA reads past a table's end without an error, so token ids are checked here."""
    embeddings = model.get_input_embeddings().num_embeddings
    largest = int(rows.examples.input_ids.max())
    if largest >= embeddings:
        raise DataError(
            f"token id {largest} occurs, the model has {embeddings} embeddings. Use the model's "
            "own tokenizer, or resize the embeddings (model.resize_token_embeddings)."
        )


def _set_pad_token(model: Any, tokenizer: Any) -> None:
    """Decoder classifiers find a row's last token by the pad id in their config."""
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id


def _set_stop_token(model: Any, tokenizer: Any, rows: Rows) -> list[str]:
    """Generation must stop at the token that trained answers end with; says so when it did not."""
    generation = getattr(model, "generation_config", None)
    template = chat_template(tokenizer)
    if generation is None or template is None or template.end_of_turn is None:
        return []
    end = tokenizer.convert_tokens_to_ids(template.end_of_turn)
    labels = rows.examples.token_labels
    if labels is None or not (labels == end).any():
        return []
    given = generation.eos_token_id
    known = list(given) if isinstance(given, list | tuple) else [given] if given is not None else []
    if end in known:
        return []
    generation.eos_token_id = [*known, end]
    return [
        f"answers end with {template.end_of_turn}, at which generation did not stop; it is added "
        "to eos_token_id of generation_config"
    ]


def _untrained_tokens(model: Any, tokenizer: Any, rows: Rows) -> list[str]:
    """Tokens of the data that the base's own tokenizer lacks, when their embeddings are frozen."""
    base = getattr(getattr(model, "config", None), "_name_or_path", None) or ""
    embedding = model.get_input_embeddings()
    if embedding is None or any(p.requires_grad for p in embedding.parameters()):
        return []
    if not (Path(base) / "tokenizer.json").is_file() or base == tokenizer.name_or_path:
        return []
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(base).get_vocab()
    new = {i: name for name, i in tokenizer.get_vocab().items() if name not in known}
    used = sorted(set(np.unique(rows.examples.input_ids).tolist()) & set(new))
    if not used:
        return []
    shown = ", ".join(new[i] for i in used[:5])
    (table,) = [n.rsplit(".", 1)[-1] for n, m in model.named_modules() if m is embedding][:1]
    return [
        f"warning: the data has tokens that {base} does not know ({len(used)}: {shown}); their "
        f"embeddings are frozen at random values: set lora_modules_to_save: [{table}, lm_head]"
    ]


def _cast_model(model: Any, config: TrainConfig) -> dict[str, np.ndarray]:
    """Put the model in config.dtype (in place); float32 originals of what is trained."""
    if config.dtype == "auto":
        return {}
    dtype = getattr(torch, config.dtype)
    masters = {
        name: parameter.detach().float().numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
        if parameter.dtype == torch.float32 != dtype
    }
    model.to(dtype)
    return masters


def _stored_masters(
    module: JaxModule, masters: Mapping[str, np.ndarray], placement: Placement
) -> dict[str, Array]:
    if not masters:
        return {}
    keys = module.layout.keys
    return {
        key: placement.replace(
            key,
            masters[keys[key][0]]
            if len(keys[key]) == 1
            else np.stack([masters[n] for n in keys[key]]),
        )
        for key in module.layout.trainable
        if keys[key][0] in masters
    }


def _example_inputs(rows: Rows, objective: Objective) -> dict[str, torch.Tensor]:
    batch = rows.batch(np.arange(min(2, len(rows))), rows.bucket_lengths[-1])
    if "segment_ids" in batch:  # what a reward model sees of a pair
        batch["attention_mask"] = np.maximum(batch["segment_ids"], 1)
    return {
        name: torch.from_numpy(np.asarray(batch[name], np.int64))
        for name in objective.inputs
        if name in batch
    }


def run_identity(
    config: TrainConfig, data: Rows, state: TrainState, frozen: Params, *, rows: int = 1
) -> dict[str, Any]:
    """What makes two runs the same run: settings, data, names and shapes, frozen weights.

    rows: devices that rows are divided over. Rows in a micro-batch count over all of them, so a run
    may go on with another number of devices.
    """
    shapes = sorted((k, v.shape) for k, v in state.trainable.items())
    weights = hashlib.sha256()
    for key in sorted(frozen):  # the first values of each tensor tell two base models apart
        for value in jax.tree.leaves(frozen[key]):
            head = value[(0,) * (value.ndim - 1)][:64] if value.ndim else value
            weights.update(np.ascontiguousarray(host_value(head)).reshape(-1).view(np.uint8).data)
    identity = {name: getattr(config, name) for name in _IDENTITY}
    identity["per_device_train_batch_size"] *= rows
    return identity | {
        "dataset": fingerprint(data),
        "trainable": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "frozen_weights": weights.hexdigest()[:16],
    }


def model_line(run: Run) -> str:
    """Parameters, for the start screen."""
    trainable, frozen = run.num_trainable, run.num_frozen
    share = 100 * trainable / max(trainable + frozen, 1)
    base = run.model.get_base_model() if isinstance(run.model, PeftModel) else run.model
    kinds = sorted({str(d) for d in run.dtypes.values()})
    return (
        f"model    {type(base).__name__}: {trainable:,} parameters trained ({share:.2f} %), "
        f"{frozen:,} frozen; computes in {', '.join(kinds)}, float32 masters"
    )
