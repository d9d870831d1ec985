"""Model files: finding, loading and writing what stock transformers and PEFT read.

adapter.py   a folder -> the torch model it stands for, adapter included
files.py     safetensors read by range
checksums.py SHA-256 of weight files, written and compared
stream.py    files -> each device's part of the stored arrays
meta.py      a model's structure without its weights
quantization.py  which weights are stored in 8 or 4 bits
merge.py     an adapter folded into its base, checked, as sharded safetensors
"""

from headrace.weights.adapter import find_adapter, load_torch_model
from headrace.weights.merge import MergeReport, merge_adapter
from headrace.weights.meta import meta_model
from headrace.weights.stream import WeightStream, load_stored, open_stream

__all__ = [
    "MergeReport",
    "WeightStream",
    "find_adapter",
    "load_stored",
    "load_torch_model",
    "merge_adapter",
    "meta_model",
    "open_stream",
]
