"""Trainers with Hugging Face's signature: build a run, step through it, evaluate, save, resume.

    trainer = SFTTrainer(model="...", args=SFTConfig(...), train_dataset=rows)
    trainer.train()

Knows: the order of things in a run. Each thing itself is done by its own file: setup.py builds,
step.py computes, checkpoint.py and saving.py write, metrics.py and display.py show.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import jax
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from headrace.config import (
    ClassificationConfig,
    DPOConfig,
    RewardConfig,
    SFTConfig,
    TrainConfig,
)
from headrace.errors import ConfigError
from headrace.plan.analytic import Estimate
from headrace.plan.automatic import Here, planned_step
from headrace.train.averaging import averaged
from headrace.train.callbacks import CallbackLike, Callbacks
from headrace.train.card import base_name, write_card
from headrace.train.checkpoint import Restored, list_checkpoints, load_checkpoint, load_latest
from headrace.train.display import Display, format_seconds
from headrace.train.evaluation import ComputeMetrics, evaluate
from headrace.train.hub import push
from headrace.train.loop import TrainLoop
from headrace.train.memory import out_of_memory_explained, size
from headrace.train.metrics import JsonLog
from headrace.train.processes import is_first, start_processes
from headrace.train.programs import Programs
from headrace.train.report import Story, write_report
from headrace.train.samples import Sampler
from headrace.train.saved_programs import saved_obstacles
from headrace.train.saving import LoadBack, load_back_run, save_run
from headrace.train.setup import Run, build_run, model_line, restart
from headrace.train.state import TrainState as ArrayState
from headrace.train.trackers import make_trackers
from headrace.train.watch import watched_processes


class Trainer:
    """Trains what `args.task` says; SFTTrainer, DPOTrainer, ... take the config of one task.

    Args:
        model: name or folder, or a transformers model (then processing_class is needed too).
        args: the configuration; see docs/configuration.md.
        train_dataset, eval_dataset: rows (list of dicts, datasets.Dataset); else args say where.
        processing_class: tokenizer, or its name.
        peft_config: peft.LoraConfig; else made from args when use_peft is set.
        callbacks: transformers.TrainerCallback objects or classes.
        compute_metrics: as in transformers, for classification.
    """

    config_class: ClassVar[type[TrainConfig]] = TrainConfig

    def __init__(
        self,
        model: str | nn.Module | None = None,
        args: TrainConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: PeftConfig | None = None,
        callbacks: Iterable[CallbackLike] = (),
        compute_metrics: ComputeMetrics | None = None,
    ) -> None:
        self.args = self._checked(args)
        self._inputs: dict[str, Any] = {
            "model": model,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "adapter_config": peft_config,
        }
        self.compute_metrics = compute_metrics
        start_processes()
        trackers = make_trackers(self.args) if is_first() else []
        self.callbacks = Callbacks([*trackers, *_stopping(self.args), *callbacks])
        self.control = TrainerControl()
        self.state = TrainerState()
        self._run: Run | None = None
        self._programs: Programs | None = None
        self._arrays: ArrayState | None = None
        self._display: Display | None = None
        self._trained = False
        self._fire("on_init_end")

    def _checked(self, args: TrainConfig | None) -> TrainConfig:
        config = self.config_class() if args is None else args
        if not isinstance(config, TrainConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"args is a {type(config).__name__}; {self.config_class.__name__} is needed. It "
                "takes the same names."
            )
        default = self.config_class().task
        if self.config_class is not TrainConfig and config.task != default:
            raise ConfigError(
                f"args.task is {config.task!r}; {type(self).__name__} does {default!r}. Use "
                f"{self.config_class.__name__}."
            )
        if config.metric_for_best_model is None:
            config = config.replace(metric_for_best_model="loss")
        if config.greater_is_better is None:
            losses = ("loss", "perplexity", "mse", "mae")
            metric = str(config.metric_for_best_model).removeprefix("eval_")
            config = config.replace(greater_is_better=not metric.endswith(losses))
        return config

    # -- what the user calls ---------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run's parts; built when first asked for: reads data, loads and captures the model."""
        if self._run is None:
            _use_compilation_cache(self.args)
            with out_of_memory_explained(lambda *_: list(_WEIGHTS_TOO_LARGE)):
                self._run, self._arrays = build_run(self.args, **self._inputs)
            self.args = self._run.config  # with what `mesh: auto` and the like became
            self._programs = Programs(
                self._run, self._arrays, on_compile=lambda event: self._say(str(event))
            )
        return self._run

    @property
    def model(self) -> Any:
        """The torch module (a PeftModel with LoRA); holds trained weights after save_model()."""
        return self.run.model

    @property
    def processing_class(self) -> Any:
        return self.run.processing_class

    @property
    def train_state(self) -> ArrayState:
        """The present arrays of the run."""
        assert self.run is not None and self._arrays is not None
        return self._arrays

    def add_callback(self, callback: CallbackLike) -> None:
        self.callbacks.add(callback)

    def remove_callback(self, callback: CallbackLike) -> None:
        self.callbacks.remove(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or on from a checkpoint (a folder, or True for the newest).

        Ctrl-C and SIGTERM finish the step and save a checkpoint first. At the end the model is
        saved to output_dir and read back with stock libraries. Raises ConfigError when output_dir
        cannot be written, TrainingError when steps stay not finite, CheckpointError when the
        checkpoint is of another run. Of several processes that train together one that disappears
        ends the others (`train.watch`).
        """
        with watched_processes(self._last_checkpoint):
            return self._train(resume_from_checkpoint)

    def _last_checkpoint(self) -> str | None:
        found = list_checkpoints(self.args.output_dir)
        return str(found[-1]) if found else None

    def _train(self, resume_from_checkpoint: bool | str | None) -> TrainOutput:
        _require_writable(Path(self.args.output_dir))
        run, config = self.run, self.args
        resume = config.resume_from_checkpoint if resume_from_checkpoint is None else None
        restored = self._restored(resume_from_checkpoint or resume)
        self._display = display = Display(run.total_steps)
        log = JsonLog(_log_path(config), append=restored is not None)
        try:
            self._start_state()
            loop = self._loop(display, log)
            if restored is not None:
                loop.restore(restored)
                self._say_restored(restored)
            self._start_screen()
            assert self._programs is not None
            before = self._programs.train.compile_seconds
            self._programs.prepare_largest(loop.arrays)
            loop.clock.exclude(self._programs.train.compile_seconds - before)
            causes = self._programs.memory(loop.arrays)
            for line in causes.lines() if causes is not None else ():
                self._say(f"memory   {line}")
            self._trained = True
            planned, first = self._planned(log), self.state.global_step
            try:
                with self._programs.explained():
                    loop.execute()
            finally:
                self._arrays = loop.arrays
            if planned is not None:
                self._hold_against(planned, loop, log, self.state.global_step - first)
            loop.finish()
            self._use_best(loop)
            loop.end()
            self.save_model()
            back = self.check_saved()
            output = self._output(loop, log, back)
            self._write_documents(loop, output)
            if config.push_to_hub:
                self.push_to_hub()
            return output
        finally:
            display.close()
            self._display = None
            log.close()

    def memory(self) -> list[str]:
        """Bytes of a device by cause, in lines; compiles the longest step, trains nothing."""
        assert self.run is not None and self._programs is not None
        self._programs.prepare_largest(self.train_state)
        causes = self._programs.memory(self.train_state)
        return ["this backend gives no account of memory"] if causes is None else causes.lines()

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the evaluation data (or of `eval_dataset`) with the present weights."""
        return self._evaluate(self.train_state, eval_dataset, metric_key_prefix)

    def save_model(self, output_dir: str | None = None) -> None:
        """Adapter (or whole model) and tokenizer, as PEFT and transformers write them."""
        save_run(self.run, averaged(self.train_state), output_dir or self.args.output_dir)

    def check_saved(self, output_dir: str | None = None) -> LoadBack:
        """Read the saved files with stock PEFT or transformers; TrainingError when they differ."""
        path = output_dir or self.args.output_dir
        result = load_back_run(self.run, averaged(self.train_state), path)
        self._say(str(result))
        return result

    def push_to_hub(self, commit_message: str = "Trained with Headrace") -> str:
        """Upload output_dir (without checkpoints) to hub_model_id; returns the address."""
        if self.args.hub_model_id is None:
            raise ConfigError("hub_model_id is not set: name the repository, such as me/my-model")
        address = push(
            Path(self.args.output_dir), self.args.hub_model_id,
            private=self.args.hub_private_repo, message=commit_message,
        )  # fmt: skip
        self._say(f"uploaded {address}")
        return address

    # -- parts of train() ------------------------------------------------------------------------

    def _loop(self, display: Display, log: JsonLog) -> TrainLoop:
        assert self._programs is not None
        has_eval = self.run.data.eval is not None
        config, sample = self.args, None
        if config.eval_samples and has_eval:
            sampler = Sampler(
                self.run, count=config.eval_samples, max_new_tokens=config.eval_sample_tokens
            )
            sample = lambda state: sampler(averaged(state))  # noqa: E731
        return TrainLoop(
            self.run,
            self._programs,
            arrays=self.train_state,
            state=self.state,
            callbacks=self.callbacks,
            evaluate=self._evaluate if has_eval else None,
            display=display,
            log=log,
            sample=sample,
        )

    def _evaluate(
        self, arrays: ArrayState, eval_dataset: Any = None, prefix: str = "eval"
    ) -> dict[str, float]:
        run = self.run
        assert self._programs is not None
        data = run.data if eval_dataset is None else run.with_eval_dataset(eval_dataset)
        return evaluate(
            self._programs.evaluate,
            averaged(arrays),
            run.frozen,
            data.eval_loader(self.args, num_devices=run.placement.rows),
            run.objective,
            compute_metrics=self.compute_metrics,
            prefix=prefix,
            place=run.placement.whole_batch,
        )

    def _start_state(self) -> None:
        config, run = self.args, self.run
        self.state = TrainerState(
            max_steps=run.total_steps,
            num_train_epochs=math.ceil(config.num_train_epochs),
            logging_steps=config.logging_steps,
            eval_steps=config.eval_steps,
            save_steps=config.save_steps,
            train_batch_size=config.per_device_train_batch_size,
        )
        if self._trained:  # as in transformers: the weights go on, the optimizer starts anew
            self._arrays = restart(run, self.train_state)

    def _restored(self, resume: bool | str | None) -> Restored | None:
        if not resume:
            return None
        template, identity = self.train_state, self.run.identity
        if resume is True:
            return load_latest(self.args.output_dir, template, identity=identity)
        return load_checkpoint(str(resume), template, identity=identity)

    def _say_restored(self, restored: Restored) -> None:
        for note in restored.notes:
            self._say(note)
        self._say(f"resumed  {restored.path} after step {restored.step}")
        now = self.args.model_dump(mode="json")
        for name, before in restored.progress["config"].items():
            skipped = name in ("resume_from_checkpoint", "output_dir")
            if not skipped and name in now and now[name] != before:
                self._say(f"changed  {name}: {before!r} before, {now[name]!r} now")

    def _start_screen(self) -> None:
        run, config = self.run, self.args
        assert self._programs is not None
        self._say(model_line(run))
        if run.adapter is not None:
            self._say(f"adapter  {run.adapter}")
        for dataset in (run.data.train, run.data.eval):
            if dataset is not None:
                width = self._display.width if self._display is not None else 100
                self._say(dataset.report.text(width))
        shapes = ", ".join(f"{a} x {b} x {s}" for a, b, s in run.train_loader.shapes)
        count, per_epoch = len(run.train_loader.shapes), run.train_loader.steps_per_epoch
        known = "rows are still prepared" if per_epoch is None else f"{per_epoch:,} in an epoch"
        self._say(
            f"steps    {run.total_steps:,}, {known}; "
            f"{count} shape{'s' if count > 1 else ''} to compile (micro-batches x rows x tokens): "
            f"{shapes}"
        )
        self._say(f"memory   activation_checkpointing: {self._programs.remat}")
        for note in (*run.notes, *self._programs.notes, *_saved_notes(self.args)):
            self._say(f"note     {note}")
        self._say(f"output   {config.output_dir}")

    def _use_best(self, loop: TrainLoop) -> None:
        """load_best_model_at_end: the arrays of the best checkpoint."""
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None:
            return
        if self.state.best_global_step == self.state.global_step:
            return
        restored = load_checkpoint(best, loop.arrays, identity=self.run.identity)
        self._arrays = loop.arrays = restored.state
        self._say(
            f"best     {best}: {self.args.metric_for_best_model} {self.state.best_metric:.4g}; used"
        )

    def _planned(self, log: JsonLog) -> Estimate | None:
        """Say what the planner expects of a step here; None on devices it does not know."""
        run = self.run
        found = planned_step(
            self.args, run.model.config.to_dict(), Here.look(),
            length=max(shape[2] for shape in run.train_loader.shapes),
        )  # fmt: skip
        if found is not None:
            self._say(
                f"planned  {found.low:.3g} to {found.high:.3g} s a step of the longest rows, "
                f"{size(found.hbm_bytes)} a device (analytic, see docs/planning.md)"
            )
            log.write(
                "planned", step=self.state.global_step, step_seconds=found.seconds,
                step_seconds_low=found.low, step_seconds_high=found.high,
                hbm_bytes_per_device=found.hbm_bytes, model_flops=found.model_flops,
            )  # fmt: skip
        return found

    def _hold_against(self, planned: Estimate, loop: TrainLoop, log: JsonLog, steps: int) -> None:
        """The plan and what the steps took, side by side."""
        if steps:
            measured = loop.step_seconds / steps
            self._say(
                f"planned  {planned.seconds:.3g} s a step, measured {measured:.3g} s: "
                f"{measured / planned.seconds:.2f} times the plan"
            )
            log.write(
                "measured", step=self.state.global_step, step_seconds=measured,
                planned_step_seconds=planned.seconds,
            )  # fmt: skip

    def _output(self, loop: TrainLoop, log: JsonLog, back: LoadBack) -> TrainOutput:
        assert self._programs is not None
        compiling = self._programs.train.compile_seconds + self._programs.evaluate.compile_seconds
        metrics = {
            "train_runtime": loop.clock.wall,
            "train_step_runtime": loop.step_seconds,
            "first_step_seconds": loop.first_step_seconds or 0.0,
            "compile_seconds": compiling,
            "train_loss": loop.training_loss,
            "epoch": self.state.epoch,
            "load_back_max_difference": back.max_difference,
        }
        log.write("end", step=self.state.global_step, **metrics)
        self._say(
            f"done     {self.state.global_step:,} steps in {format_seconds(loop.clock.wall)}, "
            f"{format_seconds(compiling)} of them compiling; saved in {self.args.output_dir}"
        )
        return TrainOutput(self.state.global_step, loop.training_loss, metrics)

    def _write_documents(self, loop: TrainLoop, output: TrainOutput) -> None:
        """README.md and report.html; only the first process of several writes."""
        if not self.args.model_card or jax.process_index():
            return
        run, config = self.run, self.args
        dataset = config.dataset_name
        known = dataset is not None and not Path(dataset).expanduser().exists()
        growing = run.data.train.growing
        rows = run.data.train.report if growing is None else growing.report_so_far()
        reports = [rows, *([run.data.eval.report] if run.data.eval else [])]
        story = Story(
            title=config.run_name or Path(config.output_dir).resolve().name,
            base=base_name(run.model, config.model_name_or_path),
            model=model_line(run).removeprefix("model").strip(),
            task=config.task,
            given={k: v for k, v in config.as_given().items() if k not in _OF_THIS_MACHINE},
            reports=reports,
            lengths=run.data.train.rows.examples.lengths if growing is None else growing.lengths(),
            history=self.state.log_history,
            samples=loop.samples,
            result={**output.metrics, "steps": output.global_step},
            versions=_versions(),
        )
        folder = Path(config.output_dir)
        adapter = isinstance(run.model, PeftModel)
        write_card(story, folder / "README.md", adapter=adapter, dataset=dataset if known else None)
        write_report(story, folder / "report.html")
        self._say(f"report   {folder / 'report.html'}")

    def _say(self, text: str) -> None:
        if not is_first():
            return
        (self._display or Display(0, quiet=True)).say(text)

    def _fire(self, hook: str) -> None:
        self.control = self.callbacks.fire(hook, self.args, self.state, self.control)


class SFTTrainer(Trainer):
    """Next-token training of a causal language model, whole or with LoRA; TRL's name for it.

    trainer = SFTTrainer("path/to/model", SFTConfig(output_dir="out"), train_dataset=rows)
    trainer.train()
    """

    config_class = SFTConfig


class ClassificationTrainer(Trainer):
    """One label, or one number, per text; the head is made for the labels found in the data."""

    config_class = ClassificationConfig


class DPOTrainer(Trainer):
    """Preference tuning: which of two answers is better. preference_loss picks the loss.

    trainer = DPOTrainer("path/to/model", DPOConfig(output_dir="out", use_peft=True),
                         train_dataset=[{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}])
    """

    config_class = DPOConfig


class RewardTrainer(Trainer):
    """A reward model: one number a text, higher for the better of two answers."""

    config_class = RewardConfig


_WEIGHTS_TOO_LARGE = (
    "The weights with what is trained of them do not fit. What helps:",
    "mesh: auto, or twice the devices with mesh: {fsdp: N}, which divides all of it",
    "quantization: nf4, for the frozen weights of an adapter's base",
    "use_peft: true, which trains an adapter only",
)


def _require_writable(folder: Path) -> None:
    """Before anything is loaded: a run that cannot save is no run. Makes nothing."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(
            f"output_dir {folder} cannot be made: {there} is a file; name another folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir {folder}: {there} is not writable; name another, or change its mode"
        )


def _stopping(config: TrainConfig) -> list[TrainerCallback]:
    """transformers' own early stopping, when it is asked for."""
    if config.early_stopping_patience is None:
        return []
    return [EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold)]


# Paths and habits of one machine: no part of how a model was made.
_OF_THIS_MACHINE = (
    "output_dir", "compilation_cache_dir", "data_cache_dir", "resume_from_checkpoint",
    "hub_model_id", "hub_private_repo", "push_to_hub", "report_to",
)  # fmt: skip


def _versions() -> dict[str, str]:
    names = ("headrace", "jax", "torch", "transformers", "peft")
    return {name: version(name) for name in names}


def _log_path(config: TrainConfig) -> Path:
    """log.jsonl; processes other than the first write none."""
    return Path(config.output_dir) / "log.jsonl" if is_first() else Path(os.devnull)


def _saved_notes(config: TrainConfig) -> list[str]:
    """Why programs that a plan saved into the compilation cache are of no use here."""
    folder = config.compilation_cache_dir
    return [] if folder is None else saved_obstacles(Path(folder).expanduser())


def _use_compilation_cache(config: TrainConfig) -> None:
    """Compiled programs survive the process: the second run of a recipe starts at once."""
    if config.compilation_cache_dir is None:
        return
    path = Path(config.compilation_cache_dir).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(path))
    # else the folder's own path becomes part of every entry's name
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
