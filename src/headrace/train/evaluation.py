"""One pass over evaluation data: every row once, results kept on the device until the end.

Knows: the compiled evaluation step, the loader. Does not know: when evaluation is due, logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction

from headrace.data.loader import Loader
from headrace.data.prefetch import Prefetch
from headrace.train.objectives import Objective, gather_predictions
from headrace.train.shapes import CompiledFunction
from headrace.train.state import Params, TrainState

ComputeMetrics = Callable[[EvalPrediction], dict[str, float]]


def evaluate(
    step: CompiledFunction,
    state: TrainState,
    frozen: Params,
    loader: Loader,
    objective: Objective,
    *,
    compute_metrics: ComputeMetrics | None = None,
    prefix: str = "eval",
    place: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, float]:
    """Metrics of the data in `loader`, names prefixed as Hugging Face does.

    compute_metrics gets transformers' EvalPrediction; it needs a loss that keeps logits
    (classification). runtime is in seconds without compilation, tokens are real tokens.
    """
    start, compiled_before = time.perf_counter(), step.compile_seconds
    pending: list[Any] = []
    batches: list[Any] = []
    with Prefetch(loader.epoch(_start())) as steps:
        for item in steps:
            batch = {name: value[0] for name, value in item.batch.items()}
            pending.append(step(state.trainable, frozen, state.buffers, place(batch)))
            batches.append({k: batch[k] for k in ("labels", "weights") if k in batch})
    sums = [{name: np.asarray(value) for name, value in result.items()} for result in pending]
    metrics = objective.metrics(sums, batches)
    if compute_metrics is not None:
        logits, labels = gather_predictions(sums, batches)
        metrics |= compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
    seconds = time.perf_counter() - start - (step.compile_seconds - compiled_before)
    tokens = float(sum(int(s["num_tokens"]) for s in sums))
    metrics |= {"runtime": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
    return {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }


def _start() -> Any:
    from headrace.data.loader import LoaderState

    return LoaderState()
