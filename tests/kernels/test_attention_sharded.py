"""Attention inside shard_map is attention, on four pretended CPU devices (own process)."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from headrace.errors import ConfigError
from headrace.kernels import attention_on_mesh

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from headrace.kernels import attention, attention_on_mesh
from jax.sharding import NamedSharding, PartitionSpec
assert len(jax.devices()) == 4
mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
q, k, v = (jax.random.normal(jax.random.key(i), (4, n, 96, 8)) for i, n in enumerate((4, 2, 2)))
more = {"segment_ids": jnp.arange(4 * 96, dtype=jnp.int32).reshape(4, 96) // 40,
        "mask": jax.random.bernoulli(jax.random.key(9), 0.7, (4, 96, 96)),
        "sinks": jnp.arange(4.0)}
def loss(attend, q, k, v, sinks):
    out = attend(q, k, v, scale=0.3, causal=True, **{**more, "sinks": sinks})
    return (out * jnp.cos(jnp.arange(8.0))).sum()
on_mesh = lambda *args, **kw: attention_on_mesh(mesh, *args, **kw)
want = jax.jit(jax.grad(lambda *a: loss(attention, *a), (0, 1, 2, 3)))(q, k, v, more["sinks"])
place = NamedSharding(mesh, PartitionSpec("data", "tensor"))
step = jax.jit(jax.grad(lambda *a: loss(on_mesh, *a), (0, 1, 2, 3)))
args = (*(jax.device_put(x, place) for x in (q, k, v)), more["sinks"])
for a, b in zip(step(*args), want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
assert "all-gather" not in step.lower(*args).compile().as_text()
print("agrees")
"""


def test_on_a_mesh_values_and_gradients_agree_and_nothing_is_gathered() -> None:
    flags = "--xla_force_host_platform_device_count=4"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "agrees", done.stderr


def test_what_cannot_be_divided_is_refused() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"))
    x = jnp.zeros((3, 1, 8, 4))
    with pytest.raises(ConfigError, match="3 sequences over 2"):
        attention_on_mesh(mesh, x, x, x, scale=1.0, causal=True)
    mesh = jax.sharding.AbstractMesh((2, 3), ("data", "context"))
    x = jnp.zeros((4, 1, 8, 4))
    with pytest.raises(ConfigError, match="8 tokens over context 3"):
        attention_on_mesh(mesh, x, x, x, scale=1.0, causal=True)
