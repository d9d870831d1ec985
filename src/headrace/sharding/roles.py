"""What a parameter is for: the model's own tensor- and expert-parallel plan, read by name.

transformers gives most decoders a plan (`q_proj: colwise`, `o_proj: rowwise`, experts, embedding).
Models without one (BERT, T5, GPT-2, ...) are read by the customary names of their linear layers.
An adapter's role is that of the weight it is on.

Knows: names, modules, PEFT's naming. Does not know: meshes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Role = Literal[
    "column",  # [out, in] divided by out: heads or features that later layers use in parts
    "row",  # [out, in] divided by in: takes the parts and sums them
    "embedding",  # [vocabulary, features]
    "experts_column",  # [experts, out, in]
    "experts_row",
    "matrix",  # two dims or more, no plan
    "vector",
    "lora_a",  # [rank, in]
    "lora_b",  # [out, rank]
    "lora_magnitude",  # [out], DoRA
    "lora_other",  # adapters of stacked expert weights, convolutions
]

_COLUMN = {
    "colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_colwise",
}  # fmt: skip
_ROW = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"}

_COLUMN_NAMES = re.compile(
    r"(^|\.)(q_proj|k_proj|v_proj|query|key|value|query_proj|key_proj|value_proj|q_lin|k_lin|v_lin"
    r"|(SelfAttention|EncDecAttention|attention|attn)\.[qkv]|wi|wi_0|wi_1|gate_proj|up_proj|fc1"
    r"|lin1|intermediate\.dense|c_fc|dense_h_to_4h|Wi)$"
)
_ROW_NAMES = re.compile(
    r"(^|\.)(o_proj|out_proj|(SelfAttention|EncDecAttention)\.o|wo|out_lin|down_proj|fc2|lin2"
    r"|output\.dense|c_proj|dense_4h_to_h|Wo)$"
)
_LORA = re.compile(r"^(.*)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.[^.]+(\.weight)?$")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """role, and who says so. base: for an adapter, the name of the weight it is on.

    transposed: the weight is stored [in, out] (GPT-2's Conv1D). head_size: features of one head
    when the weight makes key or value heads, else None.
    """

    role: Role
    source: str
    base: str | None = None
    transposed: bool = False
    head_size: int | None = None


class Roles:
    """Meanings of the parameters of one torch model, which may be on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tp = _plans(model, "tp_plan")
        self._ep = _plans(model, "ep_plan")
        self._head = _output_embedding(model)

    def __call__(self, name: str) -> Meaning:
        """The meaning of one parameter by its PyTorch name."""
        parameter = self._parameters[name]
        adapter = _LORA.match(name)
        if adapter is not None:
            return self._adapter(adapter, parameter)
        module_name, _, leaf = name.rpartition(".")
        clean = _clean(module_name)
        if parameter.ndim < 2:
            return self._vector(clean, leaf)
        module = self._modules[module_name]
        if isinstance(module, nn.Embedding):
            return Meaning(role="embedding", source="embedding table")
        if module is self._head:
            return Meaning(role="embedding", source="language model head")
        if parameter.ndim == 3:
            return self._experts(clean, leaf)
        role, source = self._linear(clean)
        return Meaning(
            role=role,
            source=source,
            transposed=type(module).__name__ == "Conv1D",
            head_size=self._head_size(module_name, clean),
        )

    def _linear(self, clean: str) -> tuple[Role, str]:
        style = _lookup(self._tp, clean)
        if style in _COLUMN:
            return "column", f"tp_plan: {style}"
        if style in _ROW:
            return "row", f"tp_plan: {style}"
        if self._tp:
            return "matrix", "not in the model's tp_plan"
        if _COLUMN_NAMES.search(clean):
            return "column", "customary name; the model has no tp_plan"
        if _ROW_NAMES.search(clean):
            return "row", "customary name; the model has no tp_plan"
        return "matrix", "the model has no tp_plan and the name says nothing"

    def _experts(self, clean: str, leaf: str) -> Meaning:
        full = f"{clean}.{leaf}"
        style = _lookup(self._tp, full) or ""
        if _lookup(self._ep, full) is None and not style:
            return Meaning(role="matrix", source="three dims, not in the model's ep_plan")
        source = f"ep_plan: {_lookup(self._ep, full)}" if style == "" else f"tp_plan: {style}"
        return Meaning(role="experts_row" if style in _ROW else "experts_column", source=source)

    def _vector(self, clean: str, leaf: str) -> Meaning:
        if leaf == "bias" and self._linear(clean)[0] == "column":
            head = self._head_size(clean, clean)
            return Meaning(role="vector", source="bias of a column", base="column", head_size=head)
        return Meaning(role="vector", source="a vector")

    def _adapter(self, match: re.Match[str], parameter: Any) -> Meaning:
        module, kind = match.group(1), match.group(2)
        base = f"{module}.base_layer.weight"
        if base not in self._parameters or parameter.ndim > 2:
            return Meaning(role="lora_other", source="adapter of a weight of several matrices")
        roles: dict[str, Role] = {
            "A": "lora_a", "embedding_A": "lora_b", "B": "lora_b", "embedding_B": "lora_a",
            "magnitude_vector": "lora_magnitude",
        }  # fmt: skip
        # lora_embedding_A is [rank, vocabulary] and _B [features, rank] of a [vocabulary, features]
        # table, so their long dims are the table's rows and columns, the other way round.
        if kind.startswith("embedding"):
            return Meaning(role="lora_other", source="adapter of an embedding table")
        return Meaning(role=roles[kind], source=f"follows {base}", base=base)

    def _head_size(self, module_name: str, clean: str) -> int | None:
        """Features of a head, for layers that make key or value heads of their own number."""
        if clean.rpartition(".")[2] not in ("k_proj", "v_proj", "key", "value", "k", "v"):
            return None
        parent = self._modules.get(module_name.removesuffix(".base_layer").rpartition(".")[0])
        size = getattr(parent, "head_dim", None) or getattr(parent, "attention_head_size", None)
        return size if isinstance(size, int) else None


def _plans(model: nn.Module, attribute: str) -> dict[str, str]:
    """The plan of the whole model; of the base model when it hangs below wrappers."""
    found = getattr(model, attribute, None)
    return dict(found) if isinstance(found, Mapping) else {}


def _output_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        return getter() if getter is not None else None
    except (AttributeError, NotImplementedError):
        return None


def _clean(module_name: str) -> str:
    """A module's name without PEFT's wrappers."""
    name = re.sub(r"\.(base_layer|original_module)(?=\.|$)", "", module_name)
    return re.sub(r"\.modules_to_save\.[^.]+", "", name)


def _lookup(plan: Mapping[str, str], name: str) -> str | None:
    """The plan's entry for a name: layer numbers are `*` there."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(pattern) or plan.get(name)
