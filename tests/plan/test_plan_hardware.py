"""Slice names, prices and what stands in the compiler's way."""

from __future__ import annotations

import sys

import pytest

from headrace.errors import ConfigError, PlanError
from headrace.plan import topology
from headrace.plan.hardware import CHIPS, all_slices, parse_slice
from headrace.plan.prices import PRICES, read_prices, slice_price


@pytest.mark.parametrize(
    ("name", "chips", "devices", "shape"),
    [
        ("v5p-8", 4, 4, (2, 2, 1)),  # cores: two a chip, which is one device
        ("v5litepod-8", 8, 8, (2, 4)),
        ("V6E-8", 8, 8, (2, 4)),
        ("v6e:2x4", 8, 8, (2, 4)),
        ("v4-8", 4, 4, (2, 2, 1)),
        ("tpu7x-128", 64, 128, (4, 4, 4)),  # a device is half a chip
        ("2xh100", 2, 2, (2,)),
        ("a100-8", 8, 8, (8,)),
    ],
)
def test_slice_names(name: str, chips: int, devices: int, shape: tuple[int, ...]):
    found = parse_slice(name)
    assert (found.num_chips, found.num_devices, found.shape) == (chips, devices, shape)


def test_unknown_slice_names_the_nearest_and_the_sizes():
    with pytest.raises(ConfigError, match=r"(?s)v5p-9.*nearest: .*v5p-8.*v5e-\{1, 4, 8"):
        parse_slice("v5p-9")
    with pytest.raises(ConfigError, match="v3 cannot be planned"):
        parse_slice("v3-8")


def test_links_close_to_rings_only_where_the_torus_does():
    assert parse_slice("v5e-8").usable_links == 2  # 2x4, open both ways
    assert parse_slice("v5e-256").usable_links == 4  # 16x16, both axes rings
    assert parse_slice("v5p-8").usable_links == 2
    assert parse_slice("v5p-128").usable_links == 6


def test_prices_of_the_paper_and_unknown_ones():
    assert slice_price(parse_slice("v5p-8")).on_demand == pytest.approx(16.80)
    assert slice_price(parse_slice("v6e-8")).on_demand == pytest.approx(21.52)
    assert slice_price(parse_slice("h100-2")).on_demand == pytest.approx(22.12)
    assert slice_price(parse_slice("v7x-8")).on_demand is None
    assert all(price.spot is None for price in PRICES.values())


def test_own_prices_are_laid_over_the_table(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("v7x: {on_demand: 12, spot: 5.5}\nv5p: 3.9\n")
    table = read_prices(path)
    assert slice_price(parse_slice("v7x-8"), table).on_demand == 48  # 4 chips
    assert slice_price(parse_slice("v7x-8"), table).spot == 22
    assert table["v5p"].on_demand == 3.9
    assert table["v5e"] == PRICES["v5e"]


def test_wrong_prices_are_listed_together(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("v9: 3\nv5p: {on_demand: -1}\nv5e: {preemptible: 1}\n")
    with pytest.raises(ConfigError, match=r"(?s)'v9' is not a chip.*-1 is given.*preemptible"):
        read_prices(path)


def test_every_slice_has_a_chip_and_a_topology():
    for name, each in all_slices().items():
        assert each.name == name
        assert each.chip is CHIPS[each.chip.name]


def test_other_systems_have_no_compiler(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux on x86-64 only" in str(topology.compiler_obstacle())
    with pytest.raises(PlanError, match="analytic model works here"):
        topology.topology_devices(parse_slice("v5e-4"))


def test_missing_libtpu_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(topology.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'headrace[tpu]'" in str(topology.compiler_obstacle())


def test_wrong_libtpu_version_names_the_right_one(monkeypatch):
    monkeypatch.setattr(topology, "version", lambda name: "0.0.7")
    monkeypatch.setattr(topology, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    assert "pip install 'libtpu==0.0.42.*'" in str(topology._version_obstacle())


def test_a_locked_libtpu_is_explained():
    error = RuntimeError("ABORTED: Internal error when accessing libtpu multi-process lockfile.")
    assert "another process" in topology._explain(parse_slice("v5e-4"), error)
