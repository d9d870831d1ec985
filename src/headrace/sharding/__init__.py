"""Where arrays lie on several devices.

mesh.py    the five axes, from a configuration to a JAX mesh
roles.py   what each parameter is for, read from the model's own plan
rules.py   roles -> specs, with reasons
place.py   specs -> arrays, optimizer state and batches on a mesh
memory.py  how much memory a device has
"""

from headrace.kernels.partition import Partition
from headrace.sharding.memory import DeviceMemory, device_memory
from headrace.sharding.mesh import MeshConfig, batch_spec, make_mesh
from headrace.sharding.place import abstract_params, make_partition, param_shardings, put_batch
from headrace.sharding.rules import ParamPlan, plan_params

__all__ = [
    "DeviceMemory",
    "MeshConfig",
    "ParamPlan",
    "Partition",
    "abstract_params",
    "batch_spec",
    "device_memory",
    "make_mesh",
    "make_partition",
    "param_shardings",
    "plan_params",
    "put_batch",
]
