"""Where the arrays of a run lie: on one device, or divided over a mesh.

Without a mesh nothing here changes anything, and the compiled programs are those of one device.

Knows: plans, meshes, several processes. Does not know: losses, files, the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from headrace.bridge.dtypes import narrowed, tensor_to_numpy, to_jax_dtype
from headrace.bridge.experts import expert_notes
from headrace.bridge.module import JaxModule, Layout
from headrace.errors import ConfigError
from headrace.sharding import MeshConfig, ParamPlan, make_mesh, make_partition, plan_params
from headrace.sharding.place import check_batch, put_batch, row_shares
from headrace.train.abstract import placed_step, state_shardings
from headrace.train.optimizers import Optimizer
from headrace.train.state import Params, TrainState, compute_dtypes, create_state
from headrace.weights import load_stored, open_stream
from headrace.weights.quantization import (
    Quantizations,
    quantizations,
    quantized_line,
    quantized_weight,
)
from headrace.weights.stream import stored_shape


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh, or None for one device, and the plan of every parameter on it."""

    config: MeshConfig = field(default_factory=MeshConfig)
    mesh: Mesh | None = None
    plans: Mapping[str, ParamPlan] = field(default_factory=dict)
    quantized: Quantizations = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def make(cls, wanted: Any, devices: Any = None) -> Placement:
        """From the setting `mesh`: None, "auto" or a mapping. Raises ConfigError."""
        devices = jax.devices() if devices is None else devices
        if wanted is None and jax.process_count() > 1:
            raise ConfigError(
                f"{jax.process_count()} processes run together, but mesh is not set; add "
                "`mesh: auto`, or the sizes of its axes"
            )
        if wanted is None:
            note = f"{len(devices)} devices are here and one is used; `mesh: auto` uses them all"
            return cls(notes=(note,) if len(devices) > 1 else ())
        config = MeshConfig.parse(wanted, len(devices))
        return cls(config=config, mesh=make_mesh(config, devices) if config.size > 1 else None)

    def planned(
        self, module: JaxModule, overrides: Mapping[str, Any]
    ) -> tuple[Placement, JaxModule]:
        """With a plan for the module's parameters, and the module divided by it."""
        if self.mesh is None:
            if overrides:
                raise ConfigError("sharding_overrides has no effect without a mesh; add mesh")
            return self, module
        plans = plan_params(module, self.config, overrides)
        partition = make_partition(self.mesh, plans)
        notes = (*self.notes, *expert_notes(module.program, partition))
        return replace(self, plans=plans, notes=notes), module.on_mesh(partition)

    def quantizing(self, module: JaxModule, format_name: str | None) -> Placement:
        """With the weights that are to be stored in 8 or 4 bits. Raises ConfigError."""
        found = quantizations(module, format_name)
        if not found:
            return self
        note = quantized_line(module, found, trainable=module.layout.trainable)
        return replace(self, quantized=found, notes=(*self.notes, note))

    # -- batches ---------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Over how many devices the rows of a batch are divided."""
        return self.config.batch_size

    @property
    def process(self) -> tuple[int, int]:
        """(share, shares): which rows of every micro-batch this process loads."""
        return (0, 1) if self.mesh is None else row_shares(self.mesh)

    def check_shapes(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Refuse batches [A, B of this process, T] that the mesh does not divide."""
        if self.mesh is not None:
            shares = self.process[1]
            for accumulation, rows, length in shapes:
                check_batch(self.mesh, (accumulation, rows * shares, length))

    def batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """This process's rows [A, B, ...] on their devices; placed arrays pass."""
        if self.mesh is None or _placed(batch):
            return batch
        return put_batch(self.mesh, batch)

    def whole_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A micro-batch [B, ...] that every process has whole, on the devices."""
        if self.mesh is None or _placed(batch):
            return batch
        one = {name: np.asarray(value)[None] for name, value in batch.items()}
        return {name: value[0] for name, value in put_batch(self.mesh, one, whole=True).items()}

    # -- arrays ----------------------------------------------------------------------------------

    def params(self, module: JaxModule, folder: Path | None = None) -> Params:
        """The torch module's parameters; on a mesh each device is given its own part only.

        folder: where parameters on the meta device are read from; trained ones as float32, those
        of `quantized` as QuantizedWeight.
        """
        tensors = dict(module.module.named_parameters(remove_duplicate=False))
        keys = module.layout.keys
        absent = {k: names for k, names in keys.items() if tensors[names[0]].is_meta}
        if self.mesh is None and not absent:
            return module.params()
        found = self._streamed(module, absent, tensors, folder) if absent else {}
        for key, names in keys.items():
            if key not in absent:
                read = _stacked_reader(module.layout, key, tensors)
                found[key] = self.put(key, stored_shape(names, tensors), read)
        return {key: found[key] for key in keys}

    def _streamed(
        self,
        module: JaxModule,
        absent: Mapping[str, tuple[str, ...]],
        tensors: Mapping[str, Any],
        folder: Path | None,
    ) -> Params:
        assert folder is not None, "weights on the meta device come from a folder"
        stream = open_stream(folder, module.module)
        stream.check()
        own = {key: to_jax_dtype(tensors[names[0]].dtype) for key, names in absent.items()}
        shardings = {key: self.sharding(key) for key in absent}
        dtypes = {
            key: np.dtype(np.float32) if key in module.layout.trainable else own[key]
            for key in absent
        }
        made = {
            key: quantized_weight(
                stored_shape(names, tensors), own[key], self.quantized[key], shardings[key]
            )
            for key, names in absent.items()
            if key in self.quantized
        }
        return load_stored(stream, absent, shardings, dtypes, made)

    def sharding(self, key: str) -> Sharding:
        """Where a stored parameter lies."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, self.plans[key].spec)

    def compute_dtypes(
        self, params: Mapping[str, Array], trainable: Iterable[str]
    ) -> dict[str, jnp.dtype]:
        """The model's own dtype of each trainable key, whatever its master was loaded as."""
        if self.mesh is None:
            return compute_dtypes(params, trainable)
        return {key: self.plans[key].dtype for key in trainable}

    def put(self, key: str, shape: tuple[int, ...], read: Callable[[Any], np.ndarray]) -> Array:
        """A stored parameter from a function that gives any part of it (an index -> values)."""
        return jax.make_array_from_callback(shape, self.sharding(key), read)

    def replace(self, key: str, value: np.ndarray) -> Array:
        """A stored parameter with other values (float32 originals of what is trained)."""
        if self.mesh is None:
            return jnp.asarray(value)
        return self.put(key, value.shape, lambda index: value[index])

    def state(
        self,
        params: Mapping[str, Array],
        buffers: Mapping[str, Array],
        *,
        trainable: Iterable[str],
        optimizer: Optimizer,
        seed: int,
    ) -> tuple[TrainState, Params]:
        """`create_state`, with every new array made where it belongs."""
        if self.mesh is None:
            return create_state(
                params, buffers, trainable=trainable, optimizer=optimizer, seed=seed
            )
        keys = frozenset(trainable)
        frozen = {key: value for key, value in params.items() if key not in keys}
        moving = {key: value for key, value in params.items() if key in keys}

        def make(moving: Params, buffers: Params) -> TrainState:
            return create_state(moving, buffers, trainable=keys, optimizer=optimizer, seed=seed)[0]

        values: Any = {key: np.asarray(value) for key, value in buffers.items()}
        shapes = jax.eval_shape(make, moving, values)
        layout = state_shardings(shapes, self.mesh, self.plans)
        return jax.jit(make, out_shardings=layout)(moving, values), frozen

    # -- programs --------------------------------------------------------------------------------

    def train_function(self, step: Callable[..., Any], state: TrainState) -> Callable[..., Any]:
        """The step with its results laid out as its arguments."""
        if self.mesh is None:
            return step
        return placed_step(step, state_shardings(state, self.mesh, self.plans), self.mesh)

    def eval_function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The evaluation step with results that every process can read."""
        if self.mesh is None:
            return step
        whole = NamedSharding(self.mesh, PartitionSpec())
        return lambda *args: jax.lax.with_sharding_constraint(step(*args), whole)


def _placed(batch: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Array) for value in batch.values())


def _stacked_reader(
    layout: Layout, key: str, tensors: Mapping[str, Any]
) -> Callable[[Any], np.ndarray]:
    names = layout.keys[key]

    def one(name: str, index: Any) -> np.ndarray:
        tensor = tensors[name]
        return narrowed(tensor_to_numpy(tensor)[index], to_jax_dtype(tensor.dtype))

    def read(index: Any) -> np.ndarray:
        if len(names) == 1:
            return one(names[0], index)
        return np.stack([one(name, index[1:]) for name in names[index[0]]])

    return read


class OnHost:
    """An array that is fetched to this host when it is read (np.asarray), and not before."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        value = host_value(self._array)
        return value if dtype is None else value.astype(dtype)


def like(array: np.ndarray, template: Array) -> Array:
    """Values laid out as `template`, in memory of their own."""
    if not template.committed:  # as the first step's: committed ones would be another program
        return jnp.array(array, copy=True)
    if template.is_fully_addressable:
        return jnp.copy(jax.device_put(array, template.sharding))
    return jax.make_array_from_callback(array.shape, template.sharding, lambda index: array[index])


def host_value(array: Any) -> np.ndarray:
    """An array's values on this host; parts on other hosts are fetched, so all must call it."""
    if isinstance(array, Array) and not array.is_fully_addressable:
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
