"""How good a model is: loss, perplexity, accuracy, weighted F1, exact match of greedy answers.

model.py     a folder -> captured model with its weights and tokenizer
score.py     one pass over the data: losses, hits, class predictions
decode.py    greedy generation
metrics.py   sums and predictions -> numbers
run.py       all of it from a TrainConfig
"""

from headrace.evaluate.decode import greedy_generate
from headrace.evaluate.metrics import classification_scores, perplexity, regression_scores
from headrace.evaluate.model import EvalModel, load_eval_model
from headrace.evaluate.run import EvalReport, evaluate

__all__ = [
    "EvalModel",
    "EvalReport",
    "classification_scores",
    "evaluate",
    "greedy_generate",
    "load_eval_model",
    "perplexity",
    "regression_scores",
]
