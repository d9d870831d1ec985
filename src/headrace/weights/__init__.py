"""Model files: finding, loading and writing what stock transformers and PEFT read.

adapter.py   a folder -> the torch model it stands for, adapter included
merge.py     an adapter folded into its base, checked, as sharded safetensors
"""

from headrace.weights.adapter import find_adapter, load_torch_model
from headrace.weights.merge import MergeReport, merge_adapter

__all__ = ["MergeReport", "find_adapter", "load_torch_model", "merge_adapter"]
