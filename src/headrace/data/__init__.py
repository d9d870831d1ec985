"""From files to batches of fixed shapes, in the order data flows.

read.py, table.py   files, folders, hub ids -> Table: rows that know where they came from
formats.py          what the columns mean -> chats, pairs, texts, labelled rows
chat.py             the tokenizer's own chat template, and which characters are trained
prepare.py          causal: tokens, what is trained, the over-length policy
classify.py         classification: tokens and labels (labels.py)
examples.py         tokenised examples, stored ragged
packing.py          several examples a row; buckets.py: a few row lengths
batches.py          rows -> arrays
loader.py           steps in a fixed, resumable order; prefetch.py: made ahead in a thread
load.py             all of it from a TrainConfig; report.py: what was done
"""

from headrace.data.dataset import Dataset, causal_dataset, labelled_dataset
from headrace.data.labels import Labels
from headrace.data.load import TrainingData, load_data
from headrace.data.loader import Loader, LoaderState, Step
from headrace.data.prefetch import Prefetch
from headrace.data.report import DataReport

__all__ = [
    "DataReport",
    "Dataset",
    "Labels",
    "Loader",
    "LoaderState",
    "Prefetch",
    "Step",
    "TrainingData",
    "causal_dataset",
    "labelled_dataset",
    "load_data",
]
