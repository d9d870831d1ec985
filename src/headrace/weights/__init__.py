"""Model files: finding, loading and writing what stock transformers and PEFT read.

adapter.py   a folder -> the torch model it stands for, adapter included
meta.py      a model's structure without its weights
merge.py     an adapter folded into its base, checked, as sharded safetensors
"""

from headrace.weights.adapter import find_adapter, load_torch_model
from headrace.weights.merge import MergeReport, merge_adapter
from headrace.weights.meta import meta_model

__all__ = ["MergeReport", "find_adapter", "load_torch_model", "merge_adapter", "meta_model"]
