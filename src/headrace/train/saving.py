"""Model files that stock transformers and PEFT read, and the proof that they do.

Trained arrays are written into the torch module in its own dtype, which is what was evaluated, and
the module's own `save_pretrained` writes the files.

Knows: save_pretrained, load-back. Does not know: training state, checkpoints' other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from peft import PeftModel
from torch import nn

from headrace.errors import TrainingError
from headrace.kernels.quantized import QuantizedWeight, dequantize
from headrace.train.lora import copy_into_module, load_back_adapter, save_adapter
from headrace.train.placement import host_value
from headrace.train.processes import is_first
from headrace.train.setup import Run
from headrace.train.state import TrainState, cast_params
from headrace.train.streaming import host_memory, is_streamed, save_streamed
from headrace.weights import load_torch_model
from headrace.weights.checksums import write_sums

# Largest difference of logits, as a share of their size, that rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class LoadBack:
    """Logits of the saved files, read by stock libraries, against ours."""

    max_difference: float
    scale: float
    rows: int
    tolerance: float
    skipped: str = ""

    @property
    def equal(self) -> bool:
        return self.max_difference <= self.tolerance * max(self.scale, 1e-6)

    def __str__(self) -> str:
        if self.skipped:
            return f"load-back: {self.skipped}"
        return (
            f"load-back: logits of {self.rows} rows differ by at most {self.max_difference:.2e} "
            f"(logits up to {self.scale:.3g})"
        )


def save_run(run: Run, state: TrainState, path: str | Path) -> None:
    """What a user loads: adapter files for a PeftModel, whole weights otherwise; the tokenizer.

    The torch module of the run holds the weights of `state` afterwards.
    """
    if is_streamed(run.model) and not isinstance(run.model, PeftModel):
        _save_streamed_model(run, state, Path(path))
        return
    arrays = run.module.layout.unstack(cast_params(state.trainable, run.dtypes))
    arrays |= run.module.buffer_layout.unstack(state.buffers)
    arrays = {name: host_value(value) for name, value in arrays.items()}
    if not is_first():
        return
    copy_into_module(run.module.module, arrays)
    if isinstance(run.model, PeftModel):
        save_adapter(run.model, path)
        base: Any = run.model.get_base_model()  # PEFT's files hold no labels and no stop tokens
        if run.data.labels is not None:
            base.config.save_pretrained(str(path))
        if getattr(base, "generation_config", None) is not None:
            base.generation_config.to_json_file(str(Path(path) / "generation_config.json"))
    else:
        run.model.save_pretrained(str(path))
    write_sums(path)
    run.processing_class.save_pretrained(str(path))


def _save_streamed_model(run: Run, state: TrainState, path: Path) -> None:
    """Whole weights from the devices, in the model's dtypes, and the model's own config files."""
    path.mkdir(parents=True, exist_ok=True)
    plans = run.placement.plans
    stored = {**state.trainable, **run.frozen}
    keys = run.module.layout.keys
    save_streamed(path, stored, keys, {key: plans[key].dtype for key in keys})
    if not is_first():
        return
    run.model.config.architectures = [type(run.model).__name__]
    run.model.config.save_pretrained(str(path))
    if getattr(run.model, "generation_config", None) is not None:
        run.model.generation_config.save_pretrained(str(path))
    run.processing_class.save_pretrained(str(path))


def load_back_run(run: Run, state: TrainState, path: str | Path, *, num_rows: int = 2) -> LoadBack:
    """`load_back` on the first rows of the training data, at most 64 tokens of each."""
    examples = run.data.train.rows.examples
    chosen = range(min(num_rows, len(examples)))
    length = min(64, *(int(examples.lengths[i]) for i in chosen))
    context = run.placement.config.context
    length = max(length // context, 1) * context  # a whole number of tokens on every device
    flat = [slice(examples.span(i).start, examples.span(i).start + length) for i in chosen]
    everything = {
        "input_ids": np.stack([examples.input_ids[part] for part in flat]),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (len(flat), 1)),
        "attention_mask": np.ones((len(flat), length), np.int32),
    }
    if examples.token_type_ids is not None:
        everything["token_type_ids"] = np.stack([examples.token_type_ids[p] for p in flat])
    inputs: dict[str, Any] = {k: v for k, v in everything.items() if k in run.objective.inputs}
    # On a mesh every device has rows: the same ones again.
    repeats = run.placement.rows
    inputs = {name: np.concatenate([value] * repeats) for name, value in inputs.items()}

    def forward(trainable: Any, frozen: Any, buffers: Any) -> Any:
        params = {**cast_params(trainable, run.dtypes), **frozen}
        return run.module.apply(params, buffers, train=False, **inputs)[0].logits

    step = jax.jit(run.placement.eval_function(forward))
    logits = np.asarray(step(state.trainable, run.frozen, state.buffers), np.float32)
    real = slice(0, len(flat))
    if not is_first():
        return LoadBack(
            max_difference=0.0, scale=0.0, rows=0, tolerance=0.0, skipped="done by process 0"
        )
    inputs = {name: value[real] for name, value in inputs.items()}
    if is_streamed(run.model):
        return _load_back_streamed(run, Path(path), inputs, logits[real])
    return load_back(run.model, path, inputs=inputs, logits=logits[real])


def _load_back_streamed(
    run: Run, path: Path, inputs: Mapping[str, np.ndarray], logits: np.ndarray
) -> LoadBack:
    """With stock libraries alone, when the whole model fits into this host's free memory.

    Quantised base weights take the place of the originals as they were multiplied in the run.
    """
    needed, free = _model_bytes(run), host_memory()
    reason = ""
    if 2 * needed > free:
        reason = (
            f"not done: stock libraries need the whole model ({needed / 2**30:.1f} GiB) in host "
            f"memory, {free / 2**30:.1f} GiB are free"
        )
    elif run.placement.quantized and jax.process_count() > 1:
        reason = "not done: the quantised base lies on several hosts"
    if reason:
        return LoadBack(max_difference=0.0, scale=0.0, rows=0, tolerance=0.0, skipped=reason)
    tensors = {name: torch.from_numpy(np.asarray(v, np.int64)) for name, v in inputs.items()}
    fresh: Any = load_torch_model(path, task=run.config.task, dtype=run.config.dtype)
    if run.placement.quantized:
        copy_into_module(fresh.get_base_model(), _dequantized(run))
    with torch.no_grad():
        theirs = fresh(**tensors).logits.float()
    return _compared(theirs, logits, fresh.dtype, path)


def _model_bytes(run: Run) -> int:
    tensors = run.module.module.parameters()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dequantized(run: Run) -> dict[str, np.ndarray]:
    """Quantised base weights by PyTorch name, in full precision."""
    decode = jax.jit(dequantize)
    values: dict[str, np.ndarray] = {}
    for key, value in run.frozen.items():
        if isinstance(value, QuantizedWeight):
            values |= run.module.layout.unstack({key: host_value(decode(value))})
    return values


def load_back(
    model: Any, path: str | Path, *, inputs: Mapping[str, np.ndarray], logits: np.ndarray
) -> LoadBack:
    """Read the files at `path` with stock libraries and compare their logits with ours.

    inputs: a few real rows without padding. Costs a second adapter, or a second whole model, in
    host memory and one forward pass of `inputs` in PyTorch. Raises TrainingError when the
    difference is beyond rounding: the files are not what was trained.
    """
    tensors = {name: torch.from_numpy(np.asarray(v, np.int64)) for name, v in inputs.items()}
    if isinstance(model, PeftModel):
        theirs = load_back_adapter(model, path, tensors)
        dtype = model.dtype
    else:
        theirs, dtype = _load_back_model(model, path, tensors)
    return _compared(theirs, logits, dtype, path)


def _compared(theirs: Any, logits: np.ndarray, dtype: Any, path: str | Path) -> LoadBack:
    ours = np.asarray(logits, np.float32)
    result = LoadBack(
        max_difference=float(np.abs(theirs.numpy() - ours).max()),
        scale=float(np.abs(ours).max()),
        rows=len(ours),
        tolerance=_TOLERANCE.get(dtype, 1e-3),
    )
    if not result.equal:
        raise TrainingError(
            f"the files in {path} do not give the trained model back: {result}. They were kept; "
            "the train state in the last checkpoint is sound. Please report this."
        )
    return result


def _load_back_model(model: Any, path: str | Path, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    kind: Any = type(model)
    fresh: nn.Module = kind.from_pretrained(str(path), dtype=model.dtype).eval()
    with torch.no_grad():
        output: Any = fresh(**tensors)
    return output.logits.float(), model.dtype
