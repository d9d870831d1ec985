"""constraints.txt pins everything pyproject.toml asks for, inside the ranges given there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
DEVICE_EXTRAS = {"tpu", "cuda"}
EXTRAS = PROJECT["optional-dependencies"].items()
ASKED = [
    *PROJECT["dependencies"],
    *(line for extra, lines in EXTRAS if extra not in DEVICE_EXTRAS for line in lines),
]
# an extra that consists of other extras asks for nothing of its own
ASKED = [line for line in ASKED if Requirement(line).name != PROJECT["name"]]


@pytest.mark.parametrize("line", ASKED)
def test_each_requirement_is_pinned_within_its_range(line: str) -> None:
    wanted = Requirement(line)
    version = PINNED.get(canonicalize_name(wanted.name))
    assert version is not None, f"{line} is not in constraints.txt; run scripts/lock"
    assert wanted.specifier.contains(version), f"{wanted.name} is pinned to {version}"


def test_nothing_of_a_device_is_pinned() -> None:
    assert not [name for name in PINNED if name.startswith(("libtpu", "nvidia", "jax-cuda"))]
