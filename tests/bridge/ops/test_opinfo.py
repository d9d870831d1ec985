"""A slice of PyTorch's OpInfo samples: the operators of language and vision models, two samples in
float32 and one in the other dtypes.

`scripts/sweep_operators.py` runs all operators; its table is docs/operators.md.
"""

from __future__ import annotations

import pytest
import torch
from opinfo_cases import Verdict, cases, error_samples, operators, refused_by, run_case

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own test helpers warn

OPERATORS = [
    "addmm",
    "arange",
    "baddbmm",
    "cat",
    "clamp",
    "cumsum",
    "div.no_rounding_mode",
    "einsum",
    "expand",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "masked_fill",
    "masked_scatter",
    "matmul",
    "mean",
    "mul",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.group_norm",
    "nn.functional.interpolate.bicubic",
    "nn.functional.layer_norm",
    "nn.functional.linear",
    "nn.functional.nll_loss",
    "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.silu",
    "pow",
    "repeat_interleave",
    "scatter",
    "scatter_add",
    "slice_scatter",
    "softmax",
    "sort",
    "sum",
    "tanh",
    "topk",
    "tril",
    "var",
    "where",
]
# What PyTorch refuses by shape or dtype, and its tracing lets through.
REFUSED_BY_RULES = {
    "bucketize": [0],
    "index_add": [0],
    "masked_scatter": [1],
    "multinomial": [1, 3, 5],
    "uniform": [0],
}
KNOWN_FAILURES: dict[str, str] = {}


def _parameters() -> list[object]:
    marks = {n: [pytest.mark.xfail(reason=why, strict=True)] for n, why in KNOWN_FAILURES.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in OPERATORS]


@pytest.mark.parametrize("name", _parameters())
def test_operator_agrees_with_torch(name: str) -> None:
    info = operators()[name]
    wrong, compared = [], 0
    for dtype, number, sample in cases(info, 2):
        if dtype != torch.float32 and number:
            continue
        backward = dtype == torch.float32 and info.supports_autograd
        forward, gradient = run_case(info, sample, backward)
        for direction, outcome in (("forward", forward), ("backward", gradient)):
            if outcome is None or outcome.verdict in (Verdict.REFUSED, Verdict.ABSENT):
                continue
            compared += 1
            if not outcome.good:
                wrong.append(f"{direction} {dtype} sample {number}: {outcome.reason}")
    assert not wrong, "\n".join(wrong)
    assert compared, "no sample was compared"


@pytest.mark.parametrize("name", REFUSED_BY_RULES)
def test_wrong_call_is_refused_by_the_rule(name: str) -> None:
    info = operators()[name]
    wrong = error_samples(info)
    where = {n: refused_by(info, wrong[n].sample_input) for n in REFUSED_BY_RULES[name]}
    assert set(where.values()) == {"rule"}, where
