"""Text from flags and YAML -> a value that fits the field's type.

YAML 1.1 reads `2e-5` as text and flags are always text. pydantic casts numbers and booleans; this
adds the rest: `none` for optional fields, `1e3` for whole numbers, lists and mappings in a flag.
"""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

import yaml


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The members of a union (through Annotated), or the type alone."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return tuple(part for arg in get_args(annotation) for part in _parts(arg))
    return (annotation,)


def cast_text(value: Any, annotation: Any) -> Any:
    """The value that `value` stands for when it is text, else `value`; never raises."""
    if not isinstance(value, str):
        return value
    parts = _parts(annotation)
    text = value.strip()
    if text.lower() in ("none", "null", "") and type(None) in parts:
        return None
    if bool in parts and str in parts and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in parts and float not in parts and "e" in text.lower():
        return _whole(text)
    if any(get_origin(part) is dict for part in parts) or (
        text.startswith("[") and any(get_origin(part) is tuple for part in parts)
    ):
        return _yaml_value(text)
    if "," in text and str in parts and any(get_origin(part) is tuple for part in parts):
        return tuple(part.strip() for part in text.split(","))
    return value


def _whole(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else text


def _yaml_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
