"""Headrace: fine-tune, evaluate and serve unmodified PyTorch models through JAX/XLA.

Names are loaded on first use, so that `import headrace` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.bridge import CheckReport as CheckReport
    from headrace.bridge import CompiledStep as CompiledStep
    from headrace.bridge import JaxModule as JaxModule
    from headrace.bridge import check as check
    from headrace.bridge import compile as compile
    from headrace.bridge import compile_step as compile_step
    from headrace.bridge import to_jax as to_jax
    from headrace.config import ClassificationConfig as ClassificationConfig
    from headrace.config import DPOConfig as DPOConfig
    from headrace.config import RewardConfig as RewardConfig
    from headrace.config import SFTConfig as SFTConfig
    from headrace.config import TrainConfig as TrainConfig
    from headrace.serve import Engine as Engine
    from headrace.serve import EngineOptions as EngineOptions
    from headrace.serve import SamplingParams as SamplingParams
    from headrace.train import ClassificationTrainer as ClassificationTrainer
    from headrace.train import DPOTrainer as DPOTrainer
    from headrace.train import RewardTrainer as RewardTrainer
    from headrace.train import SFTTrainer as SFTTrainer
    from headrace.train import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "CheckReport": "headrace.bridge",
    "ClassificationConfig": "headrace.config",
    "ClassificationTrainer": "headrace.train",
    "CompiledStep": "headrace.bridge",
    "DPOConfig": "headrace.config",
    "DPOTrainer": "headrace.train",
    "Engine": "headrace.serve",
    "EngineOptions": "headrace.serve",
    "JaxModule": "headrace.bridge",
    "RewardConfig": "headrace.config",
    "RewardTrainer": "headrace.train",
    "SFTConfig": "headrace.config",
    "SFTTrainer": "headrace.train",
    "SamplingParams": "headrace.serve",
    "TrainConfig": "headrace.config",
    "Trainer": "headrace.train",
    "check": "headrace.bridge",
    "compile": "headrace.bridge",
    "compile_step": "headrace.bridge",
    "to_jax": "headrace.bridge",
}
__all__ = [
    "CheckReport",
    "ClassificationConfig",
    "ClassificationTrainer",
    "CompiledStep",
    "DPOConfig",
    "DPOTrainer",
    "Engine",
    "EngineOptions",
    "JaxModule",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SamplingParams",
    "TrainConfig",
    "Trainer",
    "__version__",
    "check",
    "compile",
    "compile_step",
    "to_jax",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
