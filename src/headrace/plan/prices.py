"""What an hour costs: a dated table with its sources, and the user's own prices over it.

A price that is not in a source is not guessed: it is None, and the plan says unknown. Prices are
US dollars for one chip (one GPU) and one hour; they differ by region and contract.

The user's table is a YAML file (`plan: {prices: my_prices.yaml}` or --prices), for example
`v7x: {on_demand: 12.0, spot: 5.4}`; its entries replace those of the table here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from headrace.errors import ConfigError
from headrace.plan.hardware import CHIPS, Slice


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars a chip-hour; None where no source gives it. source: where and when it was read."""

    on_demand: float | None = None
    spot: float | None = None
    source: str = "no source found"


_PAPER = "arXiv:2605.25645 (2026-05): "
PRICES: Mapping[str, Price] = {
    "v4": Price(),
    "v5e": Price(on_demand=1.20, source="JAX scaling book, read 2026-11-21"),
    "v5p": Price(on_demand=4.20, source=_PAPER + "v5p-8, 4 chips, $16.80/h"),
    "v6e": Price(on_demand=2.69, source=_PAPER + "v6e-8, 8 chips, $21.52/h"),
    "v7x": Price(),
    "a100": Price(),
    "h100": Price(on_demand=11.06, source=_PAPER + "a3-highgpu-2g, 2 GPUs, $22.12/h"),
    "h200": Price(),
}


def slice_price(each: Slice, prices: Mapping[str, Price] = PRICES) -> Price:
    """Dollars an hour for the whole slice."""
    one = prices.get(each.chip.name, Price())

    def whole(value: float | None) -> float | None:
        return None if value is None else value * each.num_chips

    return Price(on_demand=whole(one.on_demand), spot=whole(one.spot), source=one.source)


def read_prices(path: str | Path | None) -> dict[str, Price]:
    """The table with the user's file laid over it. ConfigError lists every wrong entry."""
    table = dict(PRICES)
    if path is None:
        return table
    try:
        given: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"prices {path} cannot be read: {error}") from error
    problems: list[str] = []
    if not isinstance(given, dict):
        raise ConfigError(f"prices {path}: needs lines such as `v5p: {{on_demand: 4.2}}`.")
    for name, entry in cast("dict[Any, Any]", given).items():
        if name not in CHIPS:
            problems.append(f"{name!r} is not a chip; known: {', '.join(CHIPS)}")
            continue
        row: Any = {"on_demand": entry} if isinstance(entry, int | float) else entry
        wrong = _wrong_entry(row)
        if wrong:
            problems.append(f"{name}: {wrong}")
            continue
        old = table[name]
        table[name] = Price(
            on_demand=row.get("on_demand", old.on_demand),
            spot=row.get("spot", old.spot),
            source=f"{Path(path).name}",
        )
    if problems:
        raise ConfigError(f"prices {path} are wrong:\n  " + "\n  ".join(problems))
    return table


def _wrong_entry(row: Any) -> str:
    if not isinstance(row, dict):
        return f"{row!r} is given; needs dollars a chip-hour, or on_demand and spot"
    entries = cast("dict[Any, Any]", row)
    unknown = [str(key) for key in entries if key not in ("on_demand", "spot")]
    if unknown:
        return f"{', '.join(unknown)} unknown; needs on_demand and spot"
    for key, value in entries.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not number or value < 0):
            return f"{key}: {value!r} is given; needs dollars a chip-hour, 0 or more"
    return ""
