"""The registry refuses what is not exactly an ATen overload's signature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

import headrace.bridge.ops  # noqa: F401  fills the registry
from headrace.bridge.ops.registry import INT_TO_FLOAT, lookup, lowers, rules

aten = torch.ops.aten


def test_every_rule_has_a_family_and_no_rule_mutates() -> None:
    for rule in rules():
        assert rule.family not in ("unknown", "registry")
        assert not rule.schema.is_mutable, rule.op


def test_lookup_is_by_exact_overload() -> None:
    rule = lookup(aten.add.Tensor)
    assert rule is not None and rule.op is aten.add.Tensor
    assert lookup(aten.add) is None
    assert lookup(aten.add_.Tensor) is None


def test_wrong_argument_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has no argument 'x'.*has 'self'"):
        lowers(aten.special_bessel_j0.default)(lambda x: x)


def test_wrong_default_is_refused() -> None:
    def rule(self: jax.Array, bins: int = 10, min: int = 0, max: int = 0) -> jax.Array:
        return self

    with pytest.raises(TypeError, match="bins=100, the rule 10"):
        lowers(aten.histc.default)(rule)


def test_positional_argument_made_keyword_only_is_refused() -> None:
    def rule(self: jax.Array, *, index: int = 0) -> jax.Array:
        return self

    with pytest.raises(TypeError):
        lowers(aten.special_shifted_chebyshev_polynomial_t.n_scalar)(rule)


def test_second_rule_for_an_overload_is_refused() -> None:
    with pytest.raises(TypeError, match="two rules"):
        lowers(aten.sin.default)(lambda self: self)


def test_in_place_overload_is_refused() -> None:
    with pytest.raises(TypeError, match="writes to its arguments"):
        lowers(aten.sin_.default)(lambda self: self)


def test_drawing_rule_must_take_a_key() -> None:
    with pytest.raises(TypeError, match="does not take `key`"):
        lowers(aten.special_bessel_y0.default, draws=True)(lambda self: self)


def test_placement_arguments_are_dropped() -> None:
    rule = lookup(aten.ones_like.default)
    assert rule is not None
    result = rule.function(
        jnp.zeros(2, jnp.bfloat16), device=torch.device("cuda"), pin_memory=False, layout=None
    )
    assert result.dtype == jnp.bfloat16 and result.tolist() == [1, 1]
    cast = lookup(aten.to.device)
    assert cast is not None
    assert cast.function(result, torch.device("cpu"), torch.float16, False).dtype == jnp.float16


def test_promotion_casts_in_and_out() -> None:
    rule = lookup(aten.gelu.default)
    assert rule is not None and rule.promotion is INT_TO_FLOAT
    x = jnp.linspace(-3, 3, 7, dtype=jnp.bfloat16)
    wanted = jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(jnp.bfloat16)
    assert (rule.function(x) == wanted).all()


def test_key_argument_of_attention_and_prng_key_do_not_meet() -> None:
    rule = lookup(aten.scaled_dot_product_attention.default)
    assert rule is not None and rule.draws
    q = jnp.ones((1, 2, 3, 4))
    result = rule.function(q, q, q, None, 0.5, key=jax.random.key(0))
    assert result.shape == q.shape
