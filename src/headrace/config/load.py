"""YAML file + overrides -> ResolvedConfig, and the one ConfigError that lists all that is wrong.

Each layer (file, then flags) is translated to canonical names by the alias tables, then laid over
the one before. The source of every value is kept. Knows files and flags; what a field means stands
in fields.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from headrace.config.aliases import AUTOMATIC, IGNORED, REFUSED, RENAMED, TRANSLATED
from headrace.config.checks import conflicts
from headrace.config.fields import TrainConfig
from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A checked configuration and where each value came from.

    sources: field -> "default", "recipe.yaml:12" or "flag". notes: one line per foreign name.
    """

    config: TrainConfig
    sources: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Given:
    value: Any
    source: str
    written: str  # the key as the user wrote it


@dataclass(kw_only=True)
class _Findings:
    """What was met on the way: notes for the user, problems as (key, source, text)."""

    notes: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> ResolvedConfig:
    """Read a YAML file and lay overrides over it; flags win.

    overrides: {"learning_rate": "1e-4"}, or words as typed: ["--learning_rate", "1e-4", "seed=1"].
    Raises ConfigError with every unknown key, wrong value and contradiction at once. Loads no
    model and no data.
    """
    findings = _Findings()
    layers = [_read_yaml(Path(path))] if path is not None else []
    words = overrides if isinstance(overrides, Mapping) else _parse_words(overrides, findings)
    layers.append(
        [_Given(value=v, source="flag", written=k.replace("-", "_")) for k, v in words.items()]
    )
    given: dict[str, _Given] = {}
    for layer in layers:
        given |= _canonical(layer, TrainConfig, findings)
    config = TrainConfig.__new__(TrainConfig)
    _build(config, given, findings)
    sources = {n: given[n].source if n in given else "default" for n in TrainConfig.model_fields}
    return ResolvedConfig(config=config, sources=sources, notes=tuple(findings.notes))


def fill(config: TrainConfig, settings: Mapping[str, Any]) -> list[str]:
    """Validate keyword arguments into a new, empty `config`; the body of TrainConfig.__init__."""
    findings = _Findings()
    layer = [_Given(value=v, source="argument", written=k) for k, v in settings.items()]
    _build(config, _canonical(layer, type(config), findings), findings)
    return findings.notes


def _canonical(
    layer: Iterable[_Given], cls: type[TrainConfig], findings: _Findings
) -> dict[str, _Given]:
    """One layer under canonical names; foreign names noted, unknown ones and doubles reported."""
    result: dict[str, _Given] = {}
    for entry in layer:
        for name, value in _translate(entry, cls, findings).items():
            if name in result and result[name].value != value:
                problem = f"sets {name}, which {result[name].written} sets too; keep one"
                findings.problems.append((entry.written, entry.source, problem))
            result[name] = _Given(value=value, source=entry.source, written=entry.written)
    return result


def _translate(entry: _Given, cls: type[TrainConfig], findings: _Findings) -> dict[str, Any]:
    key = entry.written
    if entry.value == "auto" and RENAMED.get(key, key) in AUTOMATIC:
        return {AUTOMATIC[RENAMED.get(key, key)]: True}
    if key in cls.model_fields:
        return {key: entry.value}
    if key in RENAMED:
        findings.notes.append(f"{key} is called {RENAMED[key]} here ({entry.source})")
        return {RENAMED[key]: entry.value}
    if key in TRANSLATED:
        return _translate_value(entry, findings)
    if key in IGNORED:
        findings.notes.append(f"{key} has no effect: {IGNORED[key]} ({entry.source})")
        return {}
    if key in REFUSED and entry.value in (None, False, "", "false", "none"):
        findings.notes.append(f"{key} is switched off, as it is here ({entry.source})")
        return {}
    if key not in REFUSED and entry.value in (None, ""):
        findings.notes.append(f"{key} is not known here, and empty ({entry.source})")
        return {}
    problem = REFUSED.get(key) or _unknown(key, cls)
    findings.problems.append((key, entry.source, problem))
    return {}


def _translate_value(entry: _Given, findings: _Findings) -> dict[str, Any]:
    try:
        settings = TRANSLATED[entry.written](entry.value)
    except ValueError as error:
        findings.problems.append((entry.written, entry.source, str(error)))
        return {}
    became = ", ".join(f"{n}: {_as_yaml(v)}" for n, v in settings.items()) or "nothing to set"
    findings.notes.append(
        f"{entry.written}: {_as_yaml(entry.value)} became {became} ({entry.source})"
    )
    return settings


def _unknown(key: str, cls: type[TrainConfig]) -> str:
    names = [*cls.model_fields, *RENAMED, *TRANSLATED]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    near = list(dict.fromkeys(RENAMED.get(name, name) for name in near))
    return f"unknown; did you mean {' or '.join(near)}?" if near else "unknown"


def _build(config: TrainConfig, given: Mapping[str, _Given], findings: _Findings) -> None:
    try:
        BaseModel.__init__(config, **{name: entry.value for name, entry in given.items()})
        wrong = conflicts(config)
    except ValidationError as error:
        wrong = list(dict(_wrong_values(error)).items())
    for name, text in wrong:
        source = given[name].source if name in given else "default"
        findings.problems.append((name, source, text))
    if findings.problems:
        raise ConfigError(_message(findings.problems))


def _wrong_values(error: ValidationError) -> Iterable[tuple[str, str]]:
    for item in error.errors():
        if item["type"] == "default_factory_not_called":
            continue  # follows from another wrong value
        text = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        yield str(item["loc"][0]), f"{_as_yaml(item['input'])} is given; needs {text}"


def _message(problems: Sequence[tuple[str, str, str]]) -> str:
    count = "1 setting is" if len(problems) == 1 else f"{len(problems)} settings are"
    wide = max(len(key) for key, _, _ in problems)
    far = max(len(source) for _, source, _ in problems)
    rows = (f"  {key:<{wide}}  {source:<{far}}  {text}" for key, source, text in problems)
    return "\n".join(
        [f"{count} wrong.", *rows, "Nothing was loaded. All settings: docs/configuration.md"]
    )


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _parse_words(words: Sequence[str], findings: _Findings) -> dict[str, Any]:
    """`--key value`, `--key=value`, `key=value`, `--flag` and `--no-flag`, as typed."""
    result: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, value = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not has_value and not word.startswith("--"):
            findings.problems.append((word, "flag", "needs --name value or name=value"))
        elif has_value:
            result[key] = value
        elif rest and not rest[0].startswith("--"):
            result[key] = rest.pop(0)
        elif key.startswith("no_"):
            result[key.removeprefix("no_")] = "false"
        else:
            result[key] = "true"
    return result


def _read_yaml(path: Path) -> list[_Given]:
    """The entries of a flat YAML file, with the line each stands on."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} holds no `name: value` lines; a flat YAML file is needed")
        return [
            _Given(
                value=loader.construct_object(value, deep=True),
                source=f"{path.name}:{key.start_mark.line + 1}",
                written=str(key.value),
            )
            for key, value in node.value
        ]
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}); give the path of a YAML file"
        raise ConfigError(reason) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
