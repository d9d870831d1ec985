"""Gathers over many chips, as the real TPU compiler writes them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.plan.hardware import parse_slice
from headrace.plan.topology import (
    compiler_obstacle,
    topology_devices,
    without_compilation_cache,
)
from headrace.train.compiler_flags import FLAG_SETS


@pytest.mark.skipif(compiler_obstacle() is not None, reason=str(compiler_obstacle()))
def test_a_small_matrix_is_gathered_over_64_chips_not_summed():
    """With the default flags this is an all-reduce of padded parts, twice the bytes."""
    mesh = Mesh(np.array(topology_devices(parse_slice("v5e-64"))), ("fsdp",))
    parts = NamedSharding(mesh, PartitionSpec("fsdp"))
    weight = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=parts)

    def gathered(weight):
        whole = jax.lax.with_sharding_constraint(weight * 2, NamedSharding(mesh, PartitionSpec()))
        return whole * 2

    with without_compilation_cache():
        compiled = jax.jit(gathered).lower(weight).compile(dict(FLAG_SETS["overlap"]))
    collectives = re.findall(r"(all-gather|all-reduce|collective-permute)", compiled.as_text())
    assert set(collectives) == {"all-gather"}
