"""Fine-tuning: state, step, loop, optimizers, checkpoints, callbacks, trainers.

In the order of a run: setup.py builds (objectives.py, lora.py, optimizers.py, schedules.py,
state.py), losses.py and step.py are the program, shapes.py and programs.py compile it, loop.py
steps through it (callbacks.py, interrupt.py, evaluation.py), metrics.py and display.py tell,
checkpoint.py, durable.py and saving.py write, trainer.py is the door.
"""

from headrace.train.lora import apply_lora
from headrace.train.losses import ClassificationLoss, causal_loss
from headrace.train.optimizers import make_optimizer
from headrace.train.schedules import make_schedule
from headrace.train.state import TrainState, create_state
from headrace.train.step import make_eval_step, make_train_step
from headrace.train.trainer import (
    ClassificationTrainer,
    DPOTrainer,
    RewardTrainer,
    SFTTrainer,
    Trainer,
)

__all__ = [
    "ClassificationLoss",
    "ClassificationTrainer",
    "DPOTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "TrainState",
    "Trainer",
    "apply_lora",
    "causal_loss",
    "create_state",
    "make_eval_step",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
]
