"""Random operators: torch's distribution, other draws at each call, the same from the same seed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import headrace as hr
from headrace.bridge.ops.registry import lookup, rules

aten = torch.ops.aten
N = 4000
# Operator -> its call for N draws, torch's own, and the frozen distribution of both (None: compare
# the two samples with each other).
_X = np.zeros(N, np.float32)
CASES = {
    aten.rand.default: (([N],), lambda: torch.rand(N), stats.uniform()),
    aten.randn.default: (([N],), lambda: torch.randn(N), stats.norm()),
    aten.rand_like.default: ((_X,), lambda: torch.rand(N), stats.uniform()),
    aten.randn_like.default: ((_X,), lambda: torch.randn(N), stats.norm()),
    aten.uniform.default: ((_X, -2.0, 3.0), lambda: torch.empty(N).uniform_(-2, 3), None),
    aten.normal_functional.default: ((_X, 1.0, 0.5), lambda: torch.empty(N).normal_(1, 0.5), None),
    aten.exponential.default: ((_X, 2.0), lambda: torch.empty(N).exponential_(2.0), None),
    aten.cauchy.default: ((_X, 1.0, 2.0), lambda: torch.empty(N).cauchy_(1, 2), None),
    aten.log_normal.default: ((_X, 0.0, 0.5), lambda: torch.empty(N).log_normal_(0, 0.5), None),
    aten.geometric.default: ((_X, 0.3), lambda: torch.empty(N).geometric_(0.3), None),
    aten.poisson.default: ((_X + 4,), lambda: torch.poisson(torch.full((N,), 4.0)), None),
    aten.bernoulli.p: ((_X, 0.3), lambda: torch.empty(N).bernoulli_(0.3), None),
    aten.randint.low: ((-3, 9, [N]), lambda: torch.randint(-3, 9, (N,)), None),
    aten.multinomial.default: (
        (np.asarray([0.1, 0.2, 0.7], np.float32), N, True),
        lambda: torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), N, True),
        None,
    ),
    aten._standard_gamma.default: (
        (_X + 2,),
        lambda: torch._standard_gamma(torch.full((N,), 2.0)),
        None,
    ),
}


def _draw(op: torch._ops.OpOverload, args: tuple, seed: int) -> np.ndarray:
    rule = lookup(op)
    assert rule is not None
    args = tuple(jax.numpy.asarray(a) if isinstance(a, np.ndarray) else a for a in args)
    return np.asarray(rule.function(*args, key=jax.random.key(seed)))


@pytest.mark.parametrize("op", CASES, ids=str)
def test_distribution_is_that_of_torch(op: torch._ops.OpOverload) -> None:
    args, eager, distribution = CASES[op]
    torch.manual_seed(1)
    drawn, expected = _draw(op, args, 0), eager().numpy()
    assert drawn.shape == expected.shape
    # A p-value below 1e-4 for a fixed seed means another distribution, not bad luck.
    discrete = len(np.unique(expected)) < 60
    if distribution is not None:
        assert stats.kstest(drawn, distribution.cdf).pvalue > 1e-4
    if discrete:
        values = np.unique(np.concatenate([drawn, expected]))
        counts = np.asarray([[np.sum(x == v) for v in values] for x in (drawn, expected)])
        counts = counts[:, counts.sum(0) >= 10]
        assert stats.chi2_contingency(counts).pvalue > 1e-4
    else:
        assert stats.ks_2samp(drawn, expected).pvalue > 1e-4


@pytest.mark.parametrize("op", CASES, ids=str)
def test_a_key_gives_the_same_draws_and_another_key_others(op: torch._ops.OpOverload) -> None:
    args, _, _ = CASES[op]
    first, again, other = _draw(op, args, 0), _draw(op, args, 0), _draw(op, args, 1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_permutation_and_draws_without_replacement_have_no_repeats() -> None:
    order = _draw(aten.randperm.default, (50,), 0)
    assert sorted(order) == list(range(50))
    chosen = _draw(aten.multinomial.default, (np.ones(20, np.float32), 20, False), 0)
    assert sorted(chosen) == list(range(20))


def test_dropout_keeps_its_share_and_its_mean() -> None:
    kept = _draw(aten.dropout.default, (np.ones(N, np.float32), 0.3, True), 0)
    assert set(np.unique(kept.round(5))) == {0.0, np.float32(1 / 0.7).round(5)}
    assert abs(float((kept == 0).mean()) - 0.3) < 0.03


def test_every_rule_that_draws_takes_a_key_by_name() -> None:
    drawing = [rule for rule in rules() if rule.draws]
    assert set(CASES) <= {rule.op for rule in drawing}


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.randn_like(x), x + torch.randn_like(x)


def test_manual_seed_is_honoured_and_each_call_draws_anew() -> None:
    compiled, x = hr.compile(Noisy()), torch.zeros(64)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    torch.testing.assert_close(first, again)
    assert not torch.equal(first[0], second[0]), "two calls draw the same numbers"
    assert not torch.equal(first[0], first[1]), "two operators of a program draw the same numbers"
