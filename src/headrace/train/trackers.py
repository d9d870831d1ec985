"""`report_to`: the run's numbers in TensorBoard, Weights & Biases or trackio.

Metric names are those of transformers: train/loss, train/learning_rate, eval/loss, ... A tracker's
library is imported when it is asked for; a missing one is an error at the start, not a silent gap.

Knows: three trackers. Does not know: where numbers come from.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from headrace.config import TrainConfig
from headrace.errors import ConfigError

_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoardTracker(TrainerCallback):
    """Event files under output_dir/runs."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(Path(args.output_dir) / "runs"))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, value in tracker_names(kwargs["logs"]).items():
            self._writer.add_scalar(name, value, state.global_step)
        self._writer.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._writer.close()


class RunTracker(TrainerCallback):
    """wandb, or trackio, which has the same three calls."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._library.init(
            project="headrace",
            name=args.run_name or Path(args.output_dir).name,
            config=args.model_dump(mode="json"),
        )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._library.log({**tracker_names(kwargs["logs"]), "train/global_step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._library.finish()


def tracker_names(logs: Mapping[str, float]) -> dict[str, float]:
    """`eval_loss` -> `eval/loss`, everything else under `train/`."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in logs.items()
    }


def make_trackers(config: TrainConfig) -> list[TrainerCallback]:
    """One callback for each entry of report_to. Raises ConfigError for missing libraries."""
    made: list[TrainerCallback] = []
    missing: list[str] = []
    for name in config.report_to:
        try:
            library = importlib.import_module(_LIBRARIES[name])
        except ImportError:
            missing.append(_LIBRARIES[name])
            continue
        made.append(TensorBoardTracker() if name == "tensorboard" else RunTracker(library))
    if missing:
        raise ConfigError(
            f"report_to names trackers that are not installed: {', '.join(missing)}. Install them "
            f"(pip install {' '.join(missing)}) or take them out of report_to."
        )
    return made
