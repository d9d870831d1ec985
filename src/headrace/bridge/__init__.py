"""PyTorch program in, JAX function out; knows nothing of training."""

from headrace.bridge.check import CheckReport, check
from headrace.bridge.compile import CompiledModule, compile
from headrace.bridge.module import JaxModule, Layout, to_jax

__all__ = ["CheckReport", "CompiledModule", "JaxModule", "Layout", "check", "compile", "to_jax"]
