"""README.md of a trained model: what it is, what it was trained on, how well, and how to load it.

Nothing is left to be filled in: what is not known is not mentioned. The base model's own name is
looked up when it was given as a folder.

Knows: Markdown, the hub's metadata fields. Does not know: training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.train.report import Story, number

_PIPELINES = {
    "causal": "text-generation",
    "preference": "text-generation",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "reward": "text-classification",
}
_WHAT = {
    "causal": "supervised fine-tuning",
    "preference": "preference tuning",
    "masked-lm": "masked language modelling",
    "sequence-classification": "text classification",
    "token-classification": "token classification",
    "reward": "reward modelling",
}
_AUTO = {
    "causal": "AutoModelForCausalLM",
    "preference": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "reward": "AutoModelForSequenceClassification",
}


def base_name(model: Any, given: str | None) -> str | None:
    """The base model's public name: what its own config remembers, else what was given."""
    own = getattr(getattr(model, "config", None), "_name_or_path", None)
    for name in (own, given):
        if not name:
            continue
        config = Path(name) / "config.json"
        if config.is_file():
            found = json.loads(config.read_text(encoding="utf-8")).get("_name_or_path")
            return str(found) if found and not Path(found).exists() else Path(name).name
        return str(name)
    return None


def write_card(story: Story, path: Path, *, adapter: bool, dataset: str | None) -> Path:
    """Write the card; an earlier README.md (PEFT writes a template) is replaced."""
    path.write_text(card(story, adapter=adapter, dataset=dataset), encoding="utf-8")
    return path


def card(story: Story, *, adapter: bool, dataset: str | None) -> str:
    """The whole text. dataset: hub id of the training data, None for local files."""
    parts = [
        "---\n" + yaml.safe_dump(_metadata(story, adapter, dataset), sort_keys=False) + "---",
        f"# {story.title}",
        _opening(story, adapter),
        "## Use\n\n" + _usage(story, adapter),
        "## Results\n\n" + _results(story),
        "## Data\n\n" + "\n\n".join(f"    {_indent(str(r).rstrip())}" for r in story.reports),
        "## Training\n\n" + _training(story),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(story: Story, adapter: bool, dataset: str | None) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": _PIPELINES[story.task],
        "tags": ["headrace", *(["lora"] if adapter else [])],
    }
    if story.base:
        found["base_model"] = story.base
    if dataset:
        found["datasets"] = [dataset]
    return found


def _opening(story: Story, adapter: bool) -> str:
    what = "A LoRA adapter" if adapter else "A model"
    source = f" for {story.base}" if adapter and story.base else ""
    if not adapter and story.base:
        source = f" made from {story.base}"
    return f"{what}{source}, by {_WHAT[story.task]}. Curves and samples are in `report.html`."


def _usage(story: Story, adapter: bool) -> str:
    auto = _AUTO[story.task]
    lines = [f"from transformers import AutoTokenizer, {auto}"]
    if adapter:
        lines.append("from peft import PeftModel")
    lines.append("")
    lines.append('folder = "."  # or the name of this repository')
    if adapter:
        extra = ", num_labels=1" if story.task == "reward" else ""
        lines.append(f"base = {auto}.from_pretrained({story.base or 'your base model'!r}{extra})")
        lines.append("model = PeftModel.from_pretrained(base, folder)")
    else:
        lines.append(f"model = {auto}.from_pretrained(folder)")
    lines.append("tokenizer = AutoTokenizer.from_pretrained(folder)")
    return "```python\n" + "\n".join(lines) + "\n```"


def _results(story: Story) -> str:
    skipped = ("step", "epoch", "eval_runtime", "eval_tokens_per_second")
    if story.evaluations:
        last = story.evaluations[-1]
        rows = [
            f"| {name.removeprefix('eval_')} | {number(value)} |"
            for name, value in last.items()
            if name not in skipped
        ]
        return f"Evaluation at step {number(last['step'])}:\n\n| metric | value |\n|---|---|\n" + (
            "\n".join(rows)
        )
    if story.training:
        last = story.training[-1]
        return (
            f"No evaluation data was given. Training loss at step {number(last['step'])}: "
            f"{last['loss']:.4f}."
        )
    return "No step was logged."


def _training(story: Story) -> str:
    rows = [f"{name}: {json.dumps(value, default=list)}" for name, value in story.given.items()]
    versions = ", ".join(f"{name} {version}" for name, version in story.versions.items())
    return f"{story.model}\n\n```yaml\n" + "\n".join(rows) + f"\n```\n\nWith {versions}."


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")
