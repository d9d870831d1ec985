"""PyTorch program in, JAX function out; knows nothing of training."""

from headrace.bridge.check import CheckReport, check
from headrace.bridge.compile import CompiledModule, compile
from headrace.bridge.module import JaxModule, Layout, to_jax
from headrace.bridge.step import CompiledStep, compile_step

__all__ = [
    "CheckReport",
    "CompiledModule",
    "CompiledStep",
    "JaxModule",
    "Layout",
    "check",
    "compile",
    "compile_step",
    "to_jax",
]
