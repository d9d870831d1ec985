"""A slice of PyTorch's OpInfo samples: the operators of language and vision models, two samples a dtype.

`scripts/sweep_operators.py` runs all operators; its table is docs/operators.md.
"""

from __future__ import annotations

import pytest
import torch
from opinfo_cases import Verdict, cases, operators, run_case

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own test helpers warn

OPERATORS = """
    addmm all any arange argmax baddbmm bitwise_and bmm bucketize cat chunk clamp contiguous cos
    cumsum diagonal div.floor_rounding div.no_rounding_mode einsum eq erf exp expand flatten flip
    full_like gather ge gt index_add index_put index_select isnan le linalg.vector_norm log
    log_softmax logical_and logical_not logsumexp lt masked_fill masked_scatter matmul
    max.reduction_with_dim mean mul narrow ne neg nn.functional.adaptive_avg_pool2d
    nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.binary_cross_entropy_with_logits
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d
    nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding nn.functional.gelu
    nn.functional.glu nn.functional.group_norm nn.functional.hardswish
    nn.functional.interpolate_bicubic nn.functional.interpolate_bilinear
    nn.functional.interpolate_nearest nn.functional.layer_norm nn.functional.linear
    nn.functional.max_pool2d nn.functional.mish nn.functional.mse_loss nn.functional.nll_loss
    nn.functional.one_hot nn.functional.pad.constant nn.functional.pad.reflect
    nn.functional.pixel_shuffle nn.functional.relu nn.functional.rms_norm
    nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.softplus
    ones_like permute pow prod remainder repeat repeat_interleave reshape roll rsqrt scatter
    scatter_add select sigmoid sin slice_scatter softmax sort split sqrt squeeze stack std sub sum
    tanh topk transpose tril triu unbind unfold unsqueeze var where zeros
""".split()
KNOWN_FAILURES: dict[str, str] = {}


def _parameters() -> list[object]:
    marks = {n: [pytest.mark.xfail(reason=why, strict=True)] for n, why in KNOWN_FAILURES.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in OPERATORS]


@pytest.mark.parametrize("name", _parameters())
def test_operator_agrees_with_torch(name: str) -> None:
    info = operators()[name]
    wrong, compared = [], 0
    for dtype, number, sample in cases(info, 2):
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
