"""The training loop: steps, and what is due between them (log, evaluate, save, stop).

Device metrics are read one step late. What is due at step n is decided by the settings and by
callbacks (transformers' TrainerControl), in transformers' order: log, evaluate, save.

Knows: when. Does not know: how to build, compute, write or show; others do that.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import TrainerControl, TrainerState

from headrace.data.loader import LoaderState, Step
from headrace.data.prefetch import Prefetch
from headrace.errors import CheckpointError, DataError, TrainingError
from headrace.train.averaging import averaged
from headrace.train.callbacks import Callbacks
from headrace.train.checkpoint import Restored, list_checkpoints, rotate, save_checkpoint
from headrace.train.display import Display
from headrace.train.flops import utilisation
from headrace.train.interrupt import Interrupt
from headrace.train.memory import peak_memory
from headrace.train.metrics import JsonLog, LateMetrics, StepRecord, TrainClock, Window
from headrace.train.processes import is_first, stop_is_due
from headrace.train.programs import Programs
from headrace.train.samples import Sample
from headrace.train.saving import save_run
from headrace.train.schedules import ReduceOnPlateau
from headrace.train.setup import Run
from headrace.train.state import TrainState, host_copy

SKIPPED_IN_A_ROW = 3  # steps that are not finite before the run is given up
GRADIENT_WATCH = 3  # steps after which a parameter without any gradient is named


class TrainLoop:
    """One call of `train()`. `arrays` is always the state after the last step that was started."""

    def __init__(
        self,
        run: Run,
        programs: Programs,
        *,
        arrays: TrainState,
        state: TrainerState,
        callbacks: Callbacks,
        evaluate: Callable[[TrainState], dict[str, float]] | None,
        display: Display,
        log: JsonLog,
        sample: Callable[[TrainState], list[Sample]] | None = None,
    ) -> None:
        self.run, self.programs, self.arrays = run, programs, arrays
        self.state, self.callbacks, self.control = state, callbacks, TrainerControl()
        self._evaluate, self._display, self._log = evaluate, display, log
        self._sample, self.samples = sample, dict[int, list[Sample]]()
        self._directory = Path(run.config.output_dir)
        self._position = LoaderState()
        self._late = LateMetrics()
        self._clock = TrainClock()
        self._window = Window(self._clock)
        self._saved_step: int | None = None
        # A thread that the interpreter waits for when it ends: a checkpoint begun is finished.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-save")
        self._writing: tuple[int, Future[Path]] | None = None
        self._bad: list[StepRecord] = []
        self._silent: set[str] | None = set(arrays.trainable)
        self._loss_total, self._loss_steps = 0.0, 0
        self.step_seconds = 0.0
        self.first_step_seconds: float | None = None

    @property
    def training_loss(self) -> float:
        """Mean loss over all finite steps of this call."""
        return self._loss_total / self._loss_steps if self._loss_steps else math.nan

    @property
    def clock(self) -> TrainClock:
        return self._clock

    def restore(self, restored: Restored) -> None:
        """Go on from a checkpoint: arrays, position in the data, history, counters."""
        progress = restored.progress
        self.arrays = restored.state
        self._position = LoaderState(**progress["loader"])
        for name, value in progress["trainer_state"].items():
            setattr(self.state, name, value)
        self.callbacks.load_state_dict(progress["callbacks"])
        if isinstance(self.run.schedule, ReduceOnPlateau):
            self.run.schedule.load_state_dict(progress["schedule"])
        self._saved_step = restored.step
        if self.run.data.train.growing is not None:
            self.run.data.train.growing.expect(progress.get("pieces", ()))

    def execute(self) -> None:
        """All steps that are left. Raises what the run raises; `arrays` stays usable."""
        try:
            self._execute()
        except BaseException:
            self._collect(wait=True)  # a checkpoint being written when something else failed
            raise

    def _execute(self) -> None:
        self.control = TrainerControl()
        self._fire("on_train_begin")
        if self.run.config.eval_on_start and self.state.global_step == 0:
            self._do_evaluate()
        elif self.state.global_step == 0:
            self._do_sample()
        with Interrupt() as interrupt:
            steps = self.run.train_loader.steps(self._position)
            with Prefetch(steps) as prefetched:
                while self.state.global_step < self.run.total_steps:
                    if self._position.step == 0:
                        self._fire("on_epoch_begin")
                    self._one_step(self._next(prefetched))
                    self._between_steps()
                    if stop_is_due(self.state.global_step, interrupt.received is not None):
                        self._leave(interrupt)
                    if self.control.should_training_stop:
                        break
            self._take(self._late.flush())
        self.step_seconds = self._clock.working

    def _next(self, steps: Iterator[Step]) -> Step:
        """The next step's data; rows that turn out bad in mid-run cost no trained step."""
        growing = self.run.data.train.growing
        report = None if growing is None else growing.report()
        if report is not None:
            self._say(report.text(self._display.width))
        try:
            return next(steps)
        except DataError:
            if self.state.global_step:
                self._do_save(final=True)
            raise

    def _one_step(self, step: Step) -> None:
        run, state = self.run, self.state
        self._fire("on_step_begin")
        rate = np.float32(run.schedule(state.global_step))
        before = self.programs.train.compile_seconds
        batch = run.placement.batch(step.batch)
        self.programs.train.prepare(self.arrays, run.frozen, batch, rate)
        self._clock.exclude(self.programs.train.compile_seconds - before)
        self.arrays, metrics = self.programs.train(self.arrays, run.frozen, batch, rate)
        self._position = step.state
        state.global_step += 1
        state.epoch = self._epoch()
        state.num_input_tokens_seen += step.num_tokens
        padded = int(batch["input_ids"].size)
        previous = self._late.push(state.global_step, metrics, padded_tokens=padded)
        self._display.advance(state.global_step)
        self._fire("on_step_end")
        self._take(previous)
        if step.state.step == 0:
            self._fire("on_epoch_end")

    def _epoch(self) -> float:
        return self.run.train_loader.epochs_done(self._position)

    def _due(self, strategy: str, every: int) -> bool:
        if strategy == "epoch":
            return self._position.step == 0 or self.state.global_step == self.run.total_steps
        return strategy == "steps" and self.state.global_step % every == 0

    def _between_steps(self) -> None:
        config, control = self.run.config, self.control
        self._collect(wait=False)
        if control.should_log:
            self._take(self._late.flush())
            self._do_log()
        if self._due(config.eval_strategy, config.eval_steps) or control.should_evaluate:
            self._do_evaluate()
        if self._due(config.save_strategy, config.save_steps) or control.should_save:
            self._do_save(final=False)
        control.should_log = control.should_evaluate = control.should_save = False

    # -- metrics ---------------------------------------------------------------------------------

    def _take(self, record: StepRecord | None) -> None:
        """A step's numbers have arrived: guard, average, log when its step is due."""
        if record is None:
            return
        if self.first_step_seconds is None:  # from the call of train(), compilation included
            self.first_step_seconds = self._clock.wall
        self._watch_gradients(record)
        self._guard(record)
        self._window.add(record)
        if record.finite:
            self._loss_total += record.metrics["loss"]
            self._loss_steps += 1
        config = self.run.config
        first = config.logging_first_step and record.step == 1
        if first or record.step % config.logging_steps == 0 or record.step == self.run.total_steps:
            self._do_log(record.step)

    def _guard(self, record: StepRecord) -> None:
        """Count steps that were not finite; too many in a row end the run."""
        if record.finite:
            self._bad = []
            return
        self._bad.append(record)
        numbers = record.metrics
        self._say(
            f"step {record.step} skipped: loss {numbers['loss']}, gradient norm "
            f"{numbers['grad_norm']}, {numbers['num_supervised']:.0f} supervised; nothing changed"
        )
        if len(self._bad) < SKIPPED_IN_A_ROW:
            return
        kept = list_checkpoints(self._directory)
        last = f"The last good checkpoint is {kept[-1]}." if kept else "No checkpoint was saved."
        reason = (
            "no token of these steps is supervised: look at the labels"
            if not any(bad.metrics["num_supervised"] for bad in self._bad)
            else f"lower learning_rate (now {numbers['learning_rate']:.3g}) or look at the data"
        )
        raise TrainingError(
            f"loss or gradient is not finite since step {self._bad[0].step}, for "
            f"{len(self._bad)} steps in a row (loss {numbers['loss']}); {reason}. {last}"
        )

    def _watch_gradients(self, record: StepRecord) -> None:
        """Name parameters whose gradient was exactly zero in all of the first steps."""
        if self._silent is None or not record.finite:
            return
        squares = record.arrays.get("grad_squares")
        if squares is not None:
            keys = sorted(self.arrays.trainable)
            self._silent &= {k for k, s in zip(keys, squares, strict=True) if s == 0.0}
        if record.step < GRADIENT_WATCH:
            return
        if self._silent:
            shown = ", ".join(sorted(self._silent)[:5])
            self._say(
                f"warning: {len(self._silent)} trainable parameters had no gradient in "
                f"{GRADIENT_WATCH} steps and are not learning: {shown}"
            )
        self._silent = None

    def _do_log(self, step: int | None = None) -> None:
        if not len(self._window):
            return
        at = self.state.global_step if step is None else step
        logs = self._window.close(steps_left=self.run.total_steps - at)
        logs["epoch"] = self.state.epoch
        logs["first_step_seconds"] = self.first_step_seconds or 0.0
        logs |= peak_memory()
        share = utilisation(self.run, logs["tokens_per_second"])
        if share is not None:
            logs["mfu"] = share
        self._record("train", at, logs)
        if is_first():
            self._display.log(at, logs)

    def _record(self, event: str, step: int, logs: dict[str, float]) -> None:
        """Into the history, the log file and the callbacks."""
        self._log.write(event, step=step, seconds=round(self._clock.wall, 3), **logs)
        self.state.log_history.append({**logs, "step": step})
        now = self.state.global_step
        self.state.global_step = step  # numbers come one step late; callbacks see whose they are
        self._fire("on_log", logs=logs)
        self.state.global_step = now

    # -- evaluation and saving -------------------------------------------------------------------

    def _do_evaluate(self) -> None:
        if self._evaluate is None:
            return
        self._take(self._late.flush())
        with self._clock.pause():
            metrics = self._evaluate(self.arrays)
        metrics["epoch"] = self.state.epoch
        self._record("eval", self.state.global_step, metrics)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k != "epoch")
        self._say(f"step {self.state.global_step}/{self.run.total_steps}  {shown}")
        watched = self._watched(metrics)
        if isinstance(self.run.schedule, ReduceOnPlateau):
            self.run.schedule.observe(watched)
        self._fire("on_evaluate", metrics=metrics)
        self._do_sample()
        better = np.greater if self.run.config.greater_is_better else np.less
        if self.state.best_metric is None or better(watched, self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = watched, self.state.global_step

    def _do_sample(self) -> None:
        """Answers to the fixed prompts, on the console and in the log."""
        if self._sample is None:
            return
        step = self.state.global_step
        with self._clock.pause():
            found = self._sample(self.arrays)
        self.samples[step] = found
        self._log.write("samples", step=step, samples=[each.as_dict() for each in found])
        for each in found:
            self._say(f"sample   {each.prompt[-120:]!r} -> {each.answer!r}")

    def _watched(self, metrics: dict[str, float]) -> float:
        name = str(self.run.config.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise TrainingError(
                f"metric_for_best_model {name!r} is not among the metrics: {', '.join(metrics)}."
            )
        return metrics[name]

    def _do_save(self, *, final: bool) -> None:
        """Save. In mid-run files are written beside the steps that follow, and a failure is said
        while the run goes on; at the end it waits and raises.
        """
        step = self.state.global_step
        with self._clock.pause():
            self._collect(wait=True)  # one copy of the state at a time, and one writer
        if self._saved_step == step:
            return
        self._take(self._late.flush())
        with self._clock.pause():
            several = jax.process_count() > 1  # then all of them help to write, in step
            work = self._saving(step, self.arrays if several else host_copy(self.arrays))
            self._writing = step, self._writer.submit(work) if not several else _done(work)
            if final:
                self._collect(wait=True, final=True)

    def _collect(self, *, wait: bool, final: bool = False) -> None:
        """Take note of a checkpoint whose files are written."""
        if self._writing is None or not (wait or self._writing[1].done()):
            return
        step, written = self._writing
        self._writing = None
        try:
            path = written.result()
        except CheckpointError as error:
            if final:
                raise
            self._say(f"warning: {error} Training goes on; the next save is tried as planned.")
            return
        self._saved_step = step
        self._say(f"saved {path}")
        now, self.state.global_step = self.state.global_step, step
        self._fire("on_save")
        self.state.global_step = now

    def _saving(self, step: int, arrays: TrainState) -> Callable[[], Path]:
        """What writes a checkpoint of `arrays`; everything else it needs is taken now."""
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(self._directory / f"checkpoint-{step}")
        best, run = self.state.best_model_checkpoint, self.run
        protect = [Path(best)] if best is not None else []
        progress = json.loads(json.dumps(self._progress()))  # what the run goes on to change

        def write() -> Path:
            path = save_checkpoint(
                self._directory,
                arrays,
                step=step,
                progress=progress,
                identity=run.identity,
                write_model=lambda folder: save_run(run, averaged(arrays), folder),
            )
            rotate(self._directory, limit=run.config.save_total_limit, protect=protect)
            return path

        return write

    def _progress(self) -> dict[str, Any]:
        schedule, growing = self.run.schedule, self.run.data.train.growing
        return {
            "loader": dataclasses.asdict(self._position),
            "trainer_state": {
                name: getattr(self.state, name)
                for name in (
                    "epoch", "global_step", "num_input_tokens_seen", "log_history", "best_metric",
                    "best_global_step", "best_model_checkpoint",
                )
            },
            "pieces": [] if growing is None else growing.fingerprints,
            "callbacks": self.callbacks.state_dict(),
            "schedule": schedule.state_dict() if isinstance(schedule, ReduceOnPlateau) else {},
            "config": self.run.config.model_dump(mode="json"),
            "total_steps": self.run.total_steps,
        }  # fmt: skip

    def finish(self) -> None:
        """The checkpoint of the end, which is always saved."""
        self._do_save(final=True)

    def end(self) -> None:
        """After the last file was written."""
        self._fire("on_train_end")

    def _leave(self, interrupt: Interrupt) -> None:
        self._do_save(final=True)
        name = "Ctrl-C" if interrupt.received is not None and interrupt.received == 2 else "SIGTERM"
        message = (
            f"{name}: stopped after step {self.state.global_step} of {self.run.total_steps}; go on "
            f"with resume_from_checkpoint: true (output_dir {self._directory})"
        )
        self._say(message)
        interrupt.leave(message)

    def _say(self, text: str) -> None:
        if is_first():
            self._display.say(text)

    def _fire(self, hook: str, **kwargs: Any) -> None:
        self.control = self.callbacks.fire(
            hook, self.run.config, self.state, self.control, model=self.run.model,
            processing_class=self.run.processing_class, **kwargs,
        )  # fmt: skip


def _done(work: Callable[[], Path]) -> Future[Path]:
    """Work that is done at once, as a future."""
    found: Future[Path] = Future()
    try:
        found.set_result(work())
    except CheckpointError as error:
        found.set_exception(error)
    return found
