"""The compiled programs of a run: its training step and its evaluation step.

Also decides `activation_checkpointing: auto` by what the compiler says each policy needs.

Knows: losses, steps, compilation. Does not know: data order, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import jax
import numpy as np

from headrace.bridge.lower import RematPolicy
from headrace.data.growing import PieceLoader
from headrace.data.loader import Loader
from headrace.errors import TrainingError
from headrace.sharding import device_memory
from headrace.train.compiler_flags import compiler_options
from headrace.train.losses import Loss
from headrace.train.memory import (
    MemoryCauses,
    memory_causes,
    out_of_memory_explained,
    refused_bytes,
)
from headrace.train.setup import Run
from headrace.train.shapes import CompiledFunction, CompileEvent, MemoryUse
from headrace.train.state import TrainState
from headrace.train.step import make_eval_step, make_train_step

_POLICIES: tuple[RematPolicy, ...] = ("none", "dots", "full")  # from fastest to leanest


class Programs:
    """`train(state, frozen, batches, learning_rate)` and `evaluate(trainable, frozen, buffers,
    batch)`, compiled for each shape when it is first met."""

    def __init__(
        self, run: Run, state: TrainState, *, on_compile: Callable[[CompileEvent], None]
    ) -> None:
        self._run = run
        self._state = state
        self._on_compile = on_compile
        self.remat = run.config.activation_checkpointing
        self.notes: list[str] = []
        if self.remat == "auto":
            self.remat = self._choose_remat(state)
        loss = run.loss_for(self.remat)
        self.notes += getattr(loss, "notes", ())
        self.train = self._train_function(loss)
        self.evaluate = CompiledFunction(
            function=run.placement.eval_function(
                make_eval_step(run.loss_for("none"), dtypes=run.dtypes)
            ),
            name="evaluation step",
            batch_position=3,
            on_compile=on_compile,
        )

    def _train_function(self, loss: Loss) -> CompiledFunction:
        run = self._run
        return CompiledFunction(
            function=run.placement.train_function(
                make_train_step(
                    loss, run.optimizer, dtypes=run.dtypes, max_grad_norm=run.config.max_grad_norm
                ),
                jax.eval_shape(lambda: self._state),
            ),
            name="training step",
            batch_position=2,
            donate=(0,),
            on_compile=self._on_compile,
            expected_shapes=len(run.train_loader.shapes),
            compiler_options=compiler_options(run.config.compiler_flags, jax.default_backend()),
        )

    def prepare_largest(self, state: TrainState) -> None:
        """Compile the training step for the longest rows: what does not fit fails here."""
        with self.explained():
            self._prepare(self.train, state)
        memory, device = self.train.events[-1].memory, device_memory()
        if memory is not None and device is not None and memory.peak > device.limit:
            lines = self._explain(0, device.limit)
            raise TrainingError(
                f"the training step needs {memory.peak / 2**30:.2f} GiB, the device has "
                f"{device.limit / 2**30:.2f} GiB.\n  " + "\n  ".join(lines)
            )

    def memory(self, state: TrainState) -> MemoryCauses | None:
        """Bytes of a device by cause for the last compiled training step; None if unknown."""
        found = self.train.events[-1].memory if self.train.events else None
        if found is None:
            return None
        batch = self._run.placement.batch(example_batch(self._run.train_loader))
        return memory_causes(state, self._run.frozen, batch, found)

    def explained(self) -> AbstractContextManager[None]:
        """Inside, a device that runs out of memory raises TrainingError: causes, and what helps."""
        return out_of_memory_explained(self._explain)

    def _explain(self, wanted: int, limit: int | None) -> list[str]:
        causes = self.memory(self._state)
        if causes is None:  # the compiler refused the program: the arrays are known, and its number
            none = MemoryUse(arguments=0, outputs=0, temporary=wanted, aliased=0)
            batch = self._run.placement.batch(example_batch(self._run.train_loader))
            causes = memory_causes(self._state, self._run.frozen, batch, none)
            held = causes.frozen + causes.trainable + causes.optimizer + causes.other
            causes = replace(causes, gradients=causes.trainable, peak=held + wanted)
        return [*causes.lines(), "Changes that help most:", *self._advice(causes, limit)]

    def _advice(self, causes: MemoryCauses, limit: int | None) -> list[str]:
        config = self._run.config
        return causes.advice(
            rows=config.per_device_train_batch_size,
            length=max(shape[2] for shape in self._run.train_loader.shapes),
            remat=self.remat,
            lora=config.use_peft or self._run.adapter is not None,
            quantized=config.quantization is not None,
            devices=self._run.placement.config.size,
            limit=limit,
        )

    def _prepare(self, function: CompiledFunction, state: TrainState) -> None:
        run = self._run
        batch = run.placement.batch(example_batch(run.train_loader))
        function.prepare(state, run.frozen, batch, np.float32(0.0))

    def _choose_remat(self, state: TrainState) -> RematPolicy:
        """The first policy whose step fits; without a known limit nothing is recomputed."""
        device = device_memory()
        if device is None:
            self.notes.append("activation_checkpointing: auto -> none (no memory limit is known)")
            return "none"
        for policy in _POLICIES[:-1]:
            trial = self._train_function(self._run.loss_for(policy))
            try:
                self._prepare(trial, state)
            except jax.errors.JaxRuntimeError as error:
                if refused_bytes(str(error)) is None:
                    raise
                continue  # a TPU's compiler refuses what does not fit
            memory = trial.events[-1].memory
            if memory is not None and memory.peak <= 0.95 * device.limit:
                self.notes.append(f"activation_checkpointing: auto -> {policy}")
                return policy
        self.notes.append(f"activation_checkpointing: auto -> {_POLICIES[-1]}")
        return _POLICIES[-1]


def example_batch(loader: Loader | PieceLoader) -> dict[str, np.ndarray]:
    """A batch of filler rows in the largest shape of the loader."""
    accumulation, rows, length = max(loader.shapes, key=lambda shape: shape[2])
    flat = loader.rows.batch(np.full(accumulation * rows, -1), length)
    return {n: v.reshape(accumulation, rows, *v.shape[1:]) for n, v in flat.items()}
