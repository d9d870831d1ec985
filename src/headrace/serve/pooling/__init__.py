"""Serving models that give one vector or one class a text, in one forward pass.

recipe.py   modules.json of a sentence model -> how hidden states become an embedding
pool.py     hidden states [B, S, D] -> embeddings, in JAX
model.py    a folder -> captured encoder or classifier; which task a folder is for
engine.py   a queue, length buckets, one thread
"""

from headrace.serve.pooling.engine import PoolingEngine, PoolingOptions
from headrace.serve.pooling.model import PoolingModel, serving_task

__all__ = ["PoolingEngine", "PoolingModel", "PoolingOptions", "serving_task"]
