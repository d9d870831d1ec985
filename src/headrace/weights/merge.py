"""An adapter folded into its base: merged in float32, cast, written, read back, compared.

W' = W + scale * B A is computed in float32 and rounded once. The files are safetensors (with an
index when there are several shards) and the tokenizer's own files, so that stock
`AutoModel....from_pretrained` loads the folder. Knows: PEFT's merge. Does not know: JAX, training.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.errors import AdapterError, ConfigError
from headrace.weights.adapter import find_adapter, load_torch_model
from headrace.weights.checksums import write_sums

# Largest difference of float32 logits, as a share of their size, that rounding explains.
TOLERANCE = 1e-3
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was written and how far its logits are from the adapter's.

    difference: largest difference of logits, merged in float32 against base + adapter in float32.
    stored_difference: the same for the files as written and loaded by stock transformers, which
    includes rounding to `dtype`. scale: largest logit. agreement: share of equal arg-max.
    """

    path: Path
    dtype: str
    num_parameters: int
    shards: int
    difference: float
    stored_difference: float
    scale: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.num_parameters:,} parameters in {self.dtype}, {self.shards} "
            f"file{'s' if self.shards > 1 else ''}\n"
            f"logits against base + adapter: at most {self.difference:.2e} apart when merged in "
            f"float32, {self.stored_difference:.2e} as stored (logits up to {self.scale:.3g}); "
            f"{self.agreement:.1%} of arg-max equal"
        )


def merge_adapter(
    adapter: str | Path,
    output_dir: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> MergeReport:
    """Merge the adapter in a folder into its base and write a whole model.

    base: where the base model is, when not where the adapter says. dtype: of the written weights;
    "auto" is the base's own. max_shard_size: as in `save_pretrained`, "500MB" for example.
    Needs host memory for the base in float32 and once more in `dtype`. The output folder appears
    whole or not at all. Raises AdapterError when `adapter` is no adapter or the merged model
    computes something else, ConfigError when output_dir is taken.
    """
    adapter, output_dir = Path(adapter), Path(output_dir)
    if find_adapter(adapter) is None:
        raise AdapterError(
            f"{adapter} holds no adapter_config.json; give a folder that `headrace train` with "
            "use_peft, or PEFT, wrote"
        )
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ConfigError(f"{output_dir} exists and is not empty; give another output folder")
    model: Any = load_torch_model(
        adapter, base=base, dtype="float32", trust_remote_code=trust_remote_code
    )
    stored = _stored_dtype(model) if dtype == "auto" else getattr(torch, dtype)
    inputs = _probe(model)
    before = _logits(model, inputs)
    merged: Any = model.merge_and_unload(safe_merge=True)
    difference = _largest(before - _logits(merged, inputs))
    scale = _largest(before)
    if difference > TOLERANCE * max(scale, 1e-6):
        raise AdapterError(
            f"the merged model's logits differ from the adapter's by {difference:.2e} (logits up "
            f"to {scale:.3g}), which is more than rounding. Nothing was written. The adapter may "
            "use a method that cannot be merged; serve it as an adapter"
        )
    shards = _write(merged.to(stored), adapter, base, output_dir, max_shard_size)
    after = _logits(load_torch_model(output_dir, trust_remote_code=trust_remote_code), inputs)
    return MergeReport(
        path=output_dir,
        dtype=str(stored).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in merged.parameters()),
        shards=shards,
        difference=difference,
        stored_difference=_largest(before - after),
        scale=scale,
        agreement=float((before.argmax(-1) == after.argmax(-1)).float().mean()),
    )


def _stored_dtype(model: Any) -> torch.dtype:
    """The dtype of the base's files, whatever it was loaded in."""
    from transformers import AutoConfig

    source = model.peft_config["default"].base_model_name_or_path
    found = AutoConfig.from_pretrained(model.base_model.model.name_or_path or source).dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def _probe(model: Any) -> dict[str, torch.Tensor]:
    """One row of token ids, the same every time, clear of special ids at the start.

    One row, because decoder classifiers refuse several without a pad token.
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    low = min(100, config.vocab_size // 2)
    length = min(64, getattr(config, "max_position_embeddings", None) or 64)
    ids = torch.randint(low, config.vocab_size, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits.float()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _write(
    model: nn.Module, adapter: Path, base: str | Path | None, output_dir: Path, max_shard_size: str
) -> int:
    """Write beside the target, then rename: a stopped merge leaves no half model behind."""
    partial = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    saved: Any = model
    saved.save_pretrained(str(partial), max_shard_size=max_shard_size)
    write_sums(partial)
    _copy_tokenizer(adapter, base or saved.name_or_path, partial)
    if output_dir.exists():
        output_dir.rmdir()
    partial.rename(output_dir)
    return len(list(output_dir.glob("*.safetensors")))


def _copy_tokenizer(adapter: Path, base: str | Path, target: Path) -> None:
    """The tokenizer's own files, untouched: the adapter's if it has them, else the base's."""
    for folder in (adapter, Path(base)):
        found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        if found:
            for file in found:
                shutil.copy2(file, target / file.name)
            return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(base)).save_pretrained(str(target))
