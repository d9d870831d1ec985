"""Settings of a run: one flat, frozen model, read from YAML, flags or Python.

fields.py    every setting with its default, type and help, written once
aliases.py   names and values of other tools, and what they become here
checks.py    settings that contradict each other
load.py      YAML + flags -> ResolvedConfig, with the source of each value
adapter.py   the LoRA settings as a peft.LoraConfig
reference.py docs/configuration.md, made from the fields
"""

from headrace.config.adapter import peft_config
from headrace.config.fields import (
    ClassificationConfig,
    DPOConfig,
    RewardConfig,
    SFTConfig,
    TrainConfig,
)
from headrace.config.load import ResolvedConfig, load_config

__all__ = [
    "ClassificationConfig",
    "DPOConfig",
    "ResolvedConfig",
    "RewardConfig",
    "SFTConfig",
    "TrainConfig",
    "load_config",
    "peft_config",
]
