"""Serving the captured model: an engine with a paged key/value cache, and an OpenAI-style server.

params.py     what a request asks of sampling
model.py      a folder -> captured model, or why it cannot be served
cache.py      the graph's attention nodes -> caches, attention against pages
lora.py       several adapters on one base
programs.py   the compiled programs, warm-up
sampler.py    one token a row, on the device
pages.py      who holds which page, equal beginnings
request.py    one answer in the making
scheduler.py  what the next step computes
draft.py      guesses from the text so far
grammar.py    JSON schemas and regular expressions
text.py       tokens -> text, stop strings
adapters.py   names and slots of adapters
runner.py     one turn of the loop
engine.py     the door: submit, stream, generate
"""

from headrace.serve.answers import Answer
from headrace.serve.engine import Engine, Handle
from headrace.serve.model import ServedModel, capture_for_serving
from headrace.serve.options import EngineOptions
from headrace.serve.params import Grammar, SamplingParams
from headrace.serve.request import Delta, TokenLogprob

__all__ = [
    "Answer",
    "Delta",
    "Engine",
    "EngineOptions",
    "Grammar",
    "Handle",
    "SamplingParams",
    "ServedModel",
    "TokenLogprob",
    "capture_for_serving",
]
