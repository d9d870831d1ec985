"""How a sentence model turns hidden states into one embedding, read from its own files.

modules.json names the steps, as sentence-transformers writes them: a transformer, a pooling, then
any number of dense layers and at most one normalisation at the end. A folder without it is pooled
by the mean over its tokens, which is what sentence-transformers does with a plain encoder.

Knows: those files. Does not know: JAX, tokenizers, requests.

Shapes: D = hidden size, E = size after a dense layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
# In the order in which older files concatenate what they name.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class Dense:
    """activation(weight @ x + bias) after pooling. weight: [E, D], bias: [E] or None."""

    weight_ED: np.ndarray
    bias_E: np.ndarray | None
    activation: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From hidden states to an embedding.

    subfolder: where the transformer lies inside the folder. modes: poolings whose results are
    concatenated. max_length: most tokens a text, when the files say so. prompt: put before every
    text that is given as text.
    """

    subfolder: str = ""
    modes: tuple[str, ...] = ("mean",)
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""


def is_sentence_model(name: str | Path) -> bool:
    """Whether sentence-transformers wrote this folder or hub id."""
    return _read(name, "modules.json") is not None


def read_recipe(name: str | Path) -> Recipe:
    """The recipe of a folder or hub id; the mean over tokens when it has none of its own.

    Raises ConfigError for steps that are not served, all of them at once.
    """
    modules: Any = _read(name, "modules.json")
    if modules is None:
        return Recipe()
    problems: list[str] = []
    subfolder, modes, dense, normalize = "", ("mean",), list[Dense](), False
    for i, module in enumerate(modules):
        kind, path = str(module["type"]).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer" and i == 0:
            subfolder = path
        elif kind == "Pooling" and i == 1:
            modes = _modes(_read(name, f"{path}/config.json") or {}, problems)
        elif kind == "Dense" and i >= 2:
            dense += _dense(name, path, problems)
        elif kind == "Normalize" and i == len(modules) - 1:
            normalize = True
        else:
            problems.append(f"step {i} is {module['type']}")
    settings = _read(name, _inside(subfolder, "sentence_bert_config.json")) or {}
    if problems:
        raise ConfigError(
            f"the steps of {name} in modules.json cannot all be served: {'; '.join(problems)}. "
            "Served: Transformer, Pooling, Dense with safetensors, then Normalize"
        )
    return Recipe(
        subfolder=subfolder,
        modes=modes,
        dense=tuple(dense),
        normalize=normalize,
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompt=_prompt(_read(name, "config_sentence_transformers.json") or {}),
    )


def _modes(config: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    given: Any = config.get("pooling_mode")
    if given is None:
        given = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    problems += [f"pooling {mode!r}" for mode in modes if mode not in MODES]
    if not config.get("include_prompt", True):
        problems.append("a pooling that leaves out the prompt (include_prompt: false)")
    return modes


def _dense(name: str | Path, path: str, problems: list[str]) -> list[Dense]:
    from safetensors.numpy import load_file

    config = _read(name, f"{path}/config.json") or {}
    weights = _find(name, f"{path}/model.safetensors")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    found: list[str] = []
    if weights is None:
        found.append(f"the dense layer {path} has no model.safetensors (pickles are not read)")
    if activation not in ACTIVATIONS:
        found.append(f"the activation {activation} of {path}")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != (
        "sentence_embedding"
    ):
        found.append(f"the dense layer {path} on token vectors or with a residual")
    problems += found
    if found or weights is None:
        return []
    tensors = load_file(weights)
    bias = tensors.get("linear.bias")
    return [Dense(weight_ED=tensors["linear.weight"], bias_E=bias, activation=activation)]


def _prompt(config: Mapping[str, Any]) -> str:
    """What sentence-transformers puts before a text when its caller names no prompt."""
    name = config.get("default_prompt_name")
    return str((config.get("prompts") or {}).get(name, "")) if name else ""


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _read(name: str | Path, file: str) -> Any:
    found = _find(name, file)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def _find(name: str | Path, file: str) -> str | None:
    """A file of a folder or hub id; None when it is not there."""
    if Path(name).is_dir():
        path = Path(name) / file
        return str(path) if path.is_file() else None
    from transformers.utils.hub import cached_file

    return cached_file(
        str(name),
        file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
