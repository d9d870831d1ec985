"""Kernels: attention and the fused LM-head loss, one door each.

    attention               masks.py                which key a query may attend to
                            attention.py            the door; picks a form for the platform
                            attention_dense.py      all scores in memory (reference, dropout)
                            attention_chunked.py    blocks, memory linear in the sequence
                            attention_blocks.py     the arithmetic of one block
                            attention_tpu.py        splash attention
                            attention_gpu.py        cuDNN
                            attention_sharded.py    any of them on a mesh
    linear_cross_entropy    linear_cross_entropy.py

Imports nothing of Headrace but its errors.
"""

from headrace.kernels.attention import attention, target_platform
from headrace.kernels.attention_chunked import RESIDUALS as ATTENTION_RESIDUALS
from headrace.kernels.attention_sharded import attention_on_mesh
from headrace.kernels.linear_cross_entropy import (
    LinearCrossEntropy,
    chunk_tokens,
    linear_cross_entropy,
)
from headrace.kernels.linear_cross_entropy_sharded import linear_cross_entropy_on_mesh

__all__ = [
    "ATTENTION_RESIDUALS",
    "LinearCrossEntropy",
    "attention",
    "attention_on_mesh",
    "chunk_tokens",
    "linear_cross_entropy",
    "linear_cross_entropy_on_mesh",
    "target_platform",
]
