"""docs/configuration.md, written from the fields: a table for each group.

`python -m headrace.config.reference PATH` writes it; a test fails when the file is stale.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from headrace.config.aliases import IGNORED, REFUSED, RENAMED, TRANSLATED
from headrace.config.fields import TrainConfig

_HEAD = """# Configuration

<!-- Generated from the fields of TrainConfig; write it again with
     python -m headrace.config.reference docs/configuration.md -->

One flat set of settings, with the names of transformers and TRL. They come from a YAML file, from
flags laid over it (`--learning_rate 1e-4`, `--packing=false`, `lora_r=8`), or from Python
(`SFTConfig(...)`, `ClassificationConfig(...)`). Unknown names, wrong values and contradictions are
reported all at once, before anything is loaded.

    model_name_or_path: path/to/model
    dataset_name: data/train.jsonl
    use_peft: true
    max_steps: 200
"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group, fields in fields_by_group().items():
        rows = [_row(name, field) for name, field in fields.items()]
        parts.append(
            "\n".join(
                [f"## {group}", "", "| setting | type | default | |", "|---|---|---|---|", *rows]
            )
        )
    parts.append(_aliases())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def fields_by_group() -> dict[str, dict[str, FieldInfo]]:
    """Every field under its group, both in the order they are written."""
    groups: dict[str, dict[str, FieldInfo]] = {}
    for name, field in TrainConfig.model_fields.items():
        groups.setdefault(str(_extra(field)["group"]), {})[name] = field
    return groups


def default_text(field: FieldInfo) -> str:
    """The default as YAML, or in words where it depends on other settings."""
    extra = _extra(field)
    if "default" in extra:
        return str(extra["default"])
    value = field.get_default(call_default_factory=False)
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def type_text(annotation: Any) -> str:
    """A type as a reader of YAML knows it: `int`, `a or b`, `list of text`."""
    return " or ".join(dict.fromkeys(_type_names(annotation)))


def _type_names(annotation: Any) -> Iterator[str]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _type_names(inner[0])
    elif origin in (Union, types.UnionType):
        for part in inner:
            yield from _type_names(part)
    elif origin is Literal:
        yield from (f"`{value}`" for value in inner)
    elif origin is tuple:
        yield f"list of {type_text(inner[0])}"
    elif origin is dict:
        yield "mapping"
    else:
        names: dict[Any, str] = {str: "text", bool: "true or false", type(None): "none"}
        yield names.get(annotation) or str(annotation.__name__)


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), field
    return extra


def _row(name: str, field: FieldInfo) -> str:
    kind, default = type_text(field.annotation), default_text(field)
    return f"| `{name}` | {kind} | {default} | {field.description} |"


def _aliases() -> str:
    renamed = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    decided = ", ".join(f"`{name}`" for name in TRANSLATED)
    ignored = [f"| `{name}` | {reason} |" for name, reason in IGNORED.items()]
    refused = [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(
        [
            "## Names of other tools",
            "",
            "Taken, with one line that says what they became:",
            "",
            "| name | here |",
            "|---|---|",
            *renamed,
            "",
            f"Taken by what their value means: {decided}.",
            "",
            "Without effect here, and said so:",
            "",
            "| name | why |",
            "|---|---|",
            *ignored,
            "",
            "Refused, because the run would be another one:",
            "",
            "| name | what to do |",
            "|---|---|",
            *refused,
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
