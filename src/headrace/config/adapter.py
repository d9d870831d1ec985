"""The LoRA settings as PEFT's own LoraConfig; nothing here re-implements PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config.fields import TrainConfig

if TYPE_CHECKING:
    from peft import LoraConfig

_TASK_TYPE = {
    "causal": "CAUSAL_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "masked-lm": None,  # PEFT has no name for it: the adapter is saved for a plain model
    "preference": "CAUSAL_LM",
    "reward": "SEQ_CLS",
}


def peft_config(config: TrainConfig) -> LoraConfig | None:
    """peft.LoraConfig for the run, or None without use_peft.

    For classification PEFT itself adds the new head to what is trained.
    """
    if not config.use_peft:
        return None
    from peft import LoraConfig  # imports transformers; a config alone must load fast

    targets = config.lora_target_modules
    return LoraConfig(
        task_type=_TASK_TYPE[config.task],
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # annotated int, used as a number
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        target_parameters=list(config.lora_target_parameters) or None,
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
