"""What a model is made of, read from its config.json alone: matrices, heads, windows, vocabulary.

This is the first, quick look that the analytic model computes with; the compiled plan uses the
captured program itself. Models are described by the fields that transformers' configurations
share, so decoders and encoders of the usual make are known and anything unusual is said in `notes`.

Knows: names of configuration fields. Does not know: PyTorch, JAX, hardware.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear layer's weight. copies: stored (experts); used: applied to one token."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1

    @property
    def size(self) -> int:
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike. window: keys a query sees, None for all."""

    count: int
    matrices: tuple[Matrix, ...]
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    num_vectors: int

    @property
    def size(self) -> int:
        """Parameters of one layer."""
        return sum(matrix.size for matrix in self.matrices) + self.num_vectors

    @property
    def used(self) -> int:
        """Parameters that one token is multiplied with."""
        return sum(m.inputs * m.outputs * m.used for m in self.matrices)

    @property
    def feed_forward(self) -> int:
        """Values of the widest activation, for one token."""
        return max(matrix.outputs * matrix.used for matrix in self.matrices)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model. Sizes are numbers of parameters. period: layers after which kinds repeat."""

    name: str
    model_type: str
    vocabulary: int
    hidden: int
    layers: tuple[LayerKind, ...]
    tied: bool
    causal: bool
    max_positions: int
    extra_embeddings: int
    dtype: str
    period: int = 1
    norms_last: bool = False  # a norm behind the last linear layer of a layer
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(kind.count for kind in self.layers)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def in_layers(self) -> int:
        return sum(kind.count * kind.size for kind in self.layers)

    @property
    def size(self) -> int:
        """All parameters, with the head of a causal model."""
        heads = 1 if self.tied or not self.causal else 2
        return self.in_layers + heads * self.embedding + self.extra_embeddings + self.hidden

    def lora_size(self, rank: int, targets: Sequence[str] | str) -> int:
        """Parameters of a LoRA adapter; targets: last names of modules, or all-linear."""
        return sum(
            kind.count * rank * (m.inputs + m.outputs)
            for kind in self.layers
            for m in kind.matrices
            if m.copies == 1 and (targets == "all-linear" or m.name in targets)
        )


_HEAD_SIZES = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma4_text": 256}
_TIED = ("gemma", "gpt2", "bert", "roberta", "electra", "deberta", "modernbert", "albert", "distil")
_ENCODERS = ("bert", "roberta", "electra", "deberta", "modernbert", "albert", "distilbert", "camem")
_NORMS_LAST = ("gemma2", "gemma3", "gemma4", "olmo2", "olmo3", "glm4")
_PLAIN_MLP = (*_ENCODERS, "gpt2", "gpt_neox", "phi", "opt", "bloom", "falcon", "starcoder2")


def read_model_config(name: str, revision: str = "main") -> dict[str, Any]:
    """config.json of a folder or of a hub model (downloaded, or from the cache when offline).

    Raises ConfigError when there is none, or it cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json; a plan needs that file and no weights.")
    elif path.exists() or name.startswith((".", "/", "~")):
        raise ConfigError(f"model {name} is not a folder with a config.json.")
    else:
        file = Path(_hub_config(name, revision))
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} does not hold a model configuration.")
    return found


def _hub_config(name: str, revision: str) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return hf_hub_download(name, "config.json", revision=revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"config.json of {name} cannot be had: {first}. Give a folder that holds one; a plan "
            "needs no weights."
        ) from error


def model_shape(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape of a transformers configuration.

    Raises ConfigError naming the fields that are missing: such a model can only be planned by
    compiling.
    """
    text: Mapping[str, Any] = config
    for nested in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(nested), Mapping):
            text = config[nested]
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    hidden = _first(text, "hidden_size", "n_embd", "d_model", "dim")
    layers = _first(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _first(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    vocabulary = _first(text, "vocab_size")
    needed = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }
    missing = [key for key, value in needed.items() if not value]
    if missing:
        raise ConfigError(
            f"config.json of {name or model_type} has no {', '.join(missing)}: the quick model "
            "cannot be made for it."
        )
    assert hidden and layers and heads and vocabulary
    encoder = any(model_type.startswith(prefix) for prefix in _ENCODERS)
    positions = _first(text, "max_position_embeddings", "n_positions") or 0
    learned = (encoder and model_type != "modernbert") or model_type == "gpt2"
    types = int(text.get("type_vocab_size") or (2 if model_type == "bert" else 0))
    return ModelShape(
        name=name or model_type,
        model_type=model_type,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=_layers(text, model_type, hidden, layers, heads),
        tied=bool(text.get("tie_word_embeddings", _known_tied(config, model_type))),
        causal=not encoder,
        max_positions=positions,
        extra_embeddings=(positions + types) * hidden if learned else 0,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "float32"),
        period=_period(_layer_types(text, model_type, layers)),
        norms_last=model_type.startswith(_NORMS_LAST) or (encoder and model_type != "modernbert"),
        notes=_unusual(text),
    )


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _known_tied(config: Mapping[str, Any], model_type: str) -> bool:
    if isinstance(config.get("tie_word_embeddings"), bool):
        return config["tie_word_embeddings"]
    return model_type.startswith(_TIED)


def _layers(
    text: Mapping[str, Any], model_type: str, hidden: int, layers: int, heads: int
) -> tuple[LayerKind, ...]:
    kinds = Counter(_layer_types(text, model_type, layers))
    return tuple(
        _layer(text, model_type, hidden, heads, kind, count) for kind, count in kinds.items()
    )


def _layer_types(text: Mapping[str, Any], model_type: str, layers: int) -> list[str]:
    given = text.get("layer_types")
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) >= layers:
        return [str(kind) for kind in given[:layers]]
    if not _first(text, "sliding_window"):
        return ["full_attention"] * layers
    if text.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    every = _first(text, "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n")
    every = every or {"gemma2": 2, "gemma3_text": 6, "gemma4_text": 6}.get(model_type)
    if not every:
        return ["sliding_attention"] * layers
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _period(types: Sequence[str]) -> int:
    """The shortest stretch of layers that repeats from the start; 1 when none does."""
    for size in range(1, len(types) // 2 + 1):
        if all(kind == types[i % size] for i, kind in enumerate(types)):
            return size
    return 1


def _layer(
    text: Mapping[str, Any], model_type: str, hidden: int, heads: int, kind: str, count: int
) -> LayerKind:
    full = kind == "full_attention"
    kv_heads = _first(text, "num_key_value_heads", "num_kv_heads") or heads
    size = _first(text, "head_dim") or _HEAD_SIZES.get(model_type) or hidden // heads
    shared = bool(text.get("attention_k_eq_v")) and full
    if full:
        size = _first(text, "global_head_dim") or size
        kv_heads = _first(text, "num_global_key_value_heads") or kv_heads
    matrices = [
        Matrix(name="q_proj", inputs=hidden, outputs=heads * size),
        Matrix(name="k_proj", inputs=hidden, outputs=kv_heads * size),
        Matrix(name="o_proj", inputs=heads * size, outputs=hidden),
    ]
    if not shared:
        matrices.append(Matrix(name="v_proj", inputs=hidden, outputs=kv_heads * size))
    matrices += _feed_forward(text, model_type, hidden)
    biases = 0
    if model_type.startswith((*_ENCODERS, "gpt2", "gpt_neox")) and model_type != "modernbert":
        biases = sum(matrix.outputs for matrix in matrices) + 2 * hidden
    window = _first(text, "sliding_window", "local_attention") if not full else None
    return LayerKind(
        count=count,
        matrices=tuple(matrices),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        window=window,
        num_vectors=2 * hidden + biases,
    )


def _feed_forward(text: Mapping[str, Any], model_type: str, hidden: int) -> list[Matrix]:
    wide = _first(text, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * hidden
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
    if experts and text.get("enable_moe_block") is not False:
        used = _first(text, "num_experts_per_tok", "top_k_experts") or 1
        wide = _first(text, "moe_intermediate_size") or wide
        found = [
            Matrix(
                name="experts.gate_up_proj",
                inputs=hidden,
                outputs=2 * wide,
                copies=experts,
                used=used,
            ),
            Matrix(
                name="experts.down_proj", inputs=wide, outputs=hidden, copies=experts, used=used
            ),
            Matrix(name="router", inputs=hidden, outputs=experts),
        ]
        shared = _first(text, "shared_expert_intermediate_size")
        if shared:
            found += _gated(hidden, shared)
        return found
    if model_type.startswith(_PLAIN_MLP) and model_type != "modernbert":
        return [
            Matrix(name="up_proj", inputs=hidden, outputs=wide),
            Matrix(name="down_proj", inputs=wide, outputs=hidden),
        ]
    return _gated(hidden, wide)


def _gated(hidden: int, wide: int) -> list[Matrix]:
    return [
        Matrix(name="gate_proj", inputs=hidden, outputs=wide),
        Matrix(name="up_proj", inputs=hidden, outputs=wide),
        Matrix(name="down_proj", inputs=wide, outputs=hidden),
    ]


_UNUSUAL = {
    "num_kv_shared_layers": "some layers share keys and values",
    "hidden_size_per_layer_input": "embeddings for every layer",
    "first_k_dense_replace": "the first layers have no experts",
    "kv_lora_rank": "keys and values are compressed",
    "vision_config": "an image encoder",
}


def _unusual(text: Mapping[str, Any]) -> tuple[str, ...]:
    """What the quick look does not model; the compiled plan does."""
    return tuple(f"not in the quick model: {why}" for key, why in _UNUSUAL.items() if text.get(key))


def gib(num_bytes: float) -> str:
    """Bytes as `12.3 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB" if math.isfinite(num_bytes) else "?"
