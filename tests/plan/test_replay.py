"""Programs compiled by the real TPU compiler, whose FLOPs and bytes are known by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.kernels.attention import attention, target_platform
from headrace.plan.hardware import parse_slice
from headrace.plan.hlo import devices_together, parse_module, read_shapes
from headrace.plan.loops import trip_count
from headrace.plan.replay import Timeline, replay
from headrace.plan.topology import compiler_obstacle, topology_devices, without_compilation_cache

pytestmark = pytest.mark.skipif(compiler_obstacle() is not None, reason=str(compiler_obstacle()))
BF16 = jnp.bfloat16


def compiled_text(slice_name: str, function, *arrays, options=None) -> str:
    """arrays: (shape, dtype, spec over the axis x)."""
    devices = np.array(topology_devices(parse_slice(slice_name)))
    mesh = Mesh(devices, ("x",))
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, dtype, spec in arrays
    ]
    with without_compilation_cache():
        return jax.jit(function).lower(*args).compile(compiler_options=options).as_text()


def replayed(slice_name: str, function, *arrays, options=None) -> Timeline:
    text = compiled_text(slice_name, function, *arrays, options=options)
    return replay(parse_module(text), parse_slice(slice_name))


def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_shapes_know_their_memory():
    host, on_chip = read_shapes(
        "(bf16[8,128]{1,0:T(8,128)(2,1)S(5)}, f32[4]{0:T(128)S(1)}, u32[]{:S(2)})"
    )[:2]
    assert (host.num_bytes, host.space) == (2048, 5)
    assert (on_chip.num_bytes, on_chip.space) == (16, 1)


def test_matmul_chain_flops_and_time():
    found = replayed(
        "v5e-1",
        lambda a, b, c: (a @ b) @ c,
        ((2048, 1024), BF16, ()),
        ((1024, 4096), BF16, ()),
        ((4096, 512), BF16, ()),
    )
    flops = 2 * 2048 * 1024 * 4096 + 2 * 2048 * 4096 * 512
    assert found.flops == flops
    assert flops / 197e12 < found.seconds < 1.5 * flops / 197e12
    assert found.parts["matmuls, forward"].bound == "compute"


def test_streaming_is_bound_by_hbm():
    size = (8192, 8192)
    found = replayed("v5e-1", lambda a, b: a * 2 + b, (size, BF16, ()), (size, BF16, ()))
    num_bytes = 3 * 8192 * 8192 * 2
    part = found.parts["elementwise, forward"]
    assert part.hbm_bytes == num_bytes
    assert part.bound == "HBM"
    assert found.seconds == pytest.approx(num_bytes / 819e9 / 0.85, rel=0.1)


def test_a_scan_is_multiplied_by_its_turns():
    found = replayed("v5e-1", layers, ((1024, 1024), BF16, ()), ((7, 1024, 1024), BF16, ()))
    assert found.flops == 7 * 2 * 1024**3
    assert found.parts["matmuls, forward"].count == 7


def test_windowed_loops_step_by_two():
    """A sharded product runs as a loop that turns over two shards at a time in both directions;
    counted by its bound alone it would do twice the work."""
    arrays = (((4096, 4096), BF16, ("x",)), ((3, 4096, 4096), BF16, (None, "x")))
    text = compiled_text("v5e-8", layers, *arrays)
    module = parse_module(text)
    loops = [i for c in module.computations.values() for i in c.instructions if i.op == "while"]
    assert 3 in [trip_count(module, loop) for loop in loops]
    found = replay(module, parse_slice("v5e-8"))
    assert found.flops == 3 * 2 * 512 * 4096 * 4096


def test_all_gather_bytes_and_links():
    def gather(x):
        return jax.lax.all_gather(x, "x", tiled=True)

    devices = np.array(topology_devices(parse_slice("v5e-8")))
    mesh = Mesh(devices, ("x",))
    function = jax.shard_map(
        gather, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec(), check_vma=False
    )
    found = replayed("v5e-8", function, ((8 * 4096, 1024), BF16, ("x",)))
    received = 7 * 4096 * 1024 * 2
    assert found.link_bytes == {"all-gather": received}
    # 2x4 chips, open both ways: at most two links receive, at 45 GB/s each
    assert found.seconds >= received / 90e9
    assert found.seconds < 1.2 * received / 45e9


def test_attention_kernels_count_visible_blocks():
    shape = ((1, 8, 2048, 128), BF16, ())

    def loss(window, q, k, v):
        found = attention(q, k, v, scale=0.1, causal=True, window=window)
        return found.astype(jnp.float32).sum()

    flops = {}
    for window in (None, 512):
        with target_platform("tpu"):
            gradient = jax.grad(functools.partial(loss, window), argnums=(0, 1, 2))
            found = replayed("v5e-1", gradient, shape, shape, shape)
        flops[window] = sum(p.flops for n, p in found.parts.items() if n.startswith("attention"))
    block = 8 * 512 * 512 * 128 * 2
    products = 2 + 4 + 3  # forward, gradients of keys and values, gradient of queries
    assert flops[None] == products * block * 10  # a triangle of 4 x 4 blocks
    assert flops[512] == products * block * 8  # two blocks in each of 4 rows


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("hello\n")


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("{{0},{1}}", 1),
        ("[2,4]<=[8]", 4),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("mesh['data'=2,'fsdp'=4,'tensor'=1] {'data','fsdp','tensor'}", 8),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=3], device_ids=([2,3]T(1,0)) {'axis_1'}", 2),
    ],
)
def test_groups_of_a_collective_are_read_in_every_form(groups: str, size: int) -> None:
    assert devices_together(f"channel_id=1, replica_groups={groups}, dimensions={{2}}") == size
