"""The splash path: values in interpret mode, and compilation by the real TPU compiler."""

import functools
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.kernels.attention_dense import dense_attention
from headrace.kernels.attention_tpu import splash_attention
from headrace.kernels.masks import MaskArrays, MaskRule

CAUSAL, FULL = MaskRule(causal=True), MaskRule(causal=False)


def arrays(T: int, S: int, H: int, Hv: int, N: int = 2, K: int = 1) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(1, N, T, H), (1, K, S, H), (1, K, S, Hv)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


LEFT_PADDING = jnp.arange(150)[None, :] >= 20
CASES: dict[str, dict[str, Any]] = {
    "causal, odd length": {"rule": CAUSAL, "shape": (150, 150, 64, 64)},
    "segments": {
        "rule": CAUSAL,
        "shape": (150, 150, 64, 64),
        "arrays": MaskArrays(None, jnp.arange(150, dtype=jnp.int32)[None, :] // 40),
    },
    "left padding hides rows": {
        "rule": CAUSAL,
        "shape": (150, 150, 64, 64),
        "arrays": MaskArrays(LEFT_PADDING),
    },
    "window and softcap": {
        "rule": MaskRule(causal=True, window=30),
        "shape": (150, 150, 64, 64),
        "softcap": 2.0,
    },
    "two-sided window": {"rule": MaskRule(causal=False, window=30), "shape": (150, 150, 64, 64)},
    "cross, uneven heads": {"rule": FULL, "shape": (100, 150, 96, 64)},
    "wide heads": {"rule": CAUSAL, "shape": (130, 130, 192, 160)},
    "more queries than a window reaches": {
        "rule": MaskRule(causal=True, window=5),
        "shape": (150, 60, 64, 64),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_dense_form(case: str) -> None:
    options = dict(CASES[case])
    q, k, v = arrays(*options.pop("shape"))
    weights = jnp.cos(jnp.arange(v.shape[-1]))

    def run(form: Any) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out = form(q, k, v, scale=0.2, **options)
            return (out * weights).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    want, got = run(dense_attention), run(functools.partial(splash_attention, interpret=True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.fixture(scope="module")
def tpu() -> jax.sharding.Sharding:
    """One chip of a v5e slice that nobody has rented."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'headrace[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Only the compiler is used; another process compiling at the same time is no conflict.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@pytest.mark.parametrize(
    ("N", "K", "T", "S", "H", "Hv", "options"),
    [
        (8, 2, 1024, 1024, 64, 64, {"rule": CAUSAL, "segments": True}),
        (8, 4, 1001, 1001, 128, 128, {"rule": CAUSAL, "padding": True}),
        (4, 2, 600, 600, 256, 256, {"rule": MaskRule(causal=True, window=99), "softcap": 50.0}),
        (4, 1, 2048, 2048, 512, 512, {"rule": CAUSAL}),
        (4, 4, 512, 512, 192, 128, {"rule": CAUSAL}),
        (4, 4, 300, 1000, 80, 80, {"rule": FULL}),
        (4, 2, 512, 512, 64, 64, {"rule": MaskRule(causal=True, window=128), "sinks": True}),
    ],
)
def test_the_tpu_compiler_takes_forward_and_backward(
    tpu: jax.sharding.Sharding,
    N: int,
    K: int,
    T: int,
    S: int,
    H: int,
    Hv: int,
    options: dict[str, Any],
) -> None:
    def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=tpu)

    options = dict(options)
    padding = shaped(2, S, dtype=jnp.bool_) if options.pop("padding", False) else None
    segments = shaped(2, T, dtype=jnp.int32) if options.pop("segments", False) else None
    sinks = shaped(N, dtype=jnp.float32) if options.pop("sinks", False) else None

    def loss(q: Any, k: Any, v: Any, sinks: Any, padding: Any, segments: Any) -> jax.Array:
        masks = MaskArrays(padding, segments)
        out = splash_attention(q, k, v, scale=0.1, arrays=masks, sinks_N=sinks, **options)
        return out.astype(jnp.float32).sum()

    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    qkv = shaped(2, N, T, H), shaped(2, K, S, H), shaped(2, K, S, Hv)
    step = jax.jit(jax.grad(loss, argnums)).lower(*qkv, sinks, padding, segments)
    assert step.compile().as_text().count("tpu_custom_call") >= 3  # forward, dq, dkv
