"""Optimizers against torch's and transformers' own, and stacked against unstacked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, Trainer
from transformers.optimization import Adafactor

from headrace.errors import ConfigError
from headrace.train.optimizers import (
    decay_keys,
    decay_parameter_names,
    make_optimizer,
)

SHAPES = {"q.weight": (6, 4), "q.bias": (6,), "conv.weight": (5, 3, 2), "norm.weight": (4,)}
DECAY = frozenset({"q.weight", "conv.weight"})
STEPS = 20


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def lion_reference(p: np.ndarray, m: np.ndarray, g: np.ndarray, lr: float, wd: float) -> Any:
    """Chen et al. 2023, algorithm 2, with decoupled decay."""
    p = p * (1 - lr * wd) - lr * np.sign(0.9 * m + 0.1 * g)
    return p, 0.98 * m + 0.02 * g


def torch_run(optim: str, weight_decay: float) -> dict[str, np.ndarray]:
    params = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in arrays(0).items()}
    groups = [
        {"params": [p for n, p in params.items() if n in DECAY], "weight_decay": weight_decay},
        {"params": [p for n, p in params.items() if n not in DECAY], "weight_decay": 0.0},
    ]
    if optim == "adamw_torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=1.0, betas=(0.9, 0.98), eps=1e-7
        )
    elif optim == "sgd":
        optimizer = torch.optim.SGD(groups, lr=1.0)
    else:
        optimizer = Adafactor(groups, lr=1.0, scale_parameter=False, relative_step=False)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for name, grad in arrays(step + 1).items():
            params[name].grad = torch.tensor(grad)
        optimizer.step()
    return {n: p.detach().numpy() for n, p in params.items()}


def lion_run(weight_decay: float) -> dict[str, np.ndarray]:
    params = arrays(0)
    moments = {n: np.zeros_like(p) for n, p in params.items()}
    for step in range(STEPS):
        for n, g in arrays(step + 1).items():
            wd = weight_decay if n in DECAY else 0.0
            params[n], moments[n] = lion_reference(params[n], moments[n], g, 0.01 / (step + 1), wd)
    return params


def our_run(optim: str, weight_decay: float, stacked: int = 0) -> dict[str, np.ndarray]:
    """Our run; with `stacked` = L the parameters are L copies scaled by 1..L on a leading axis."""

    def shaped(tree: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        if not stacked:
            return {n: jnp.asarray(a) for n, a in tree.items()}
        return {n: jnp.stack([a * (i + 1) for i in range(stacked)]) for n, a in tree.items()}

    optimizer = make_optimizer(
        optim,
        stacked=frozenset(SHAPES) if stacked else frozenset(),
        decay=DECAY,
        weight_decay=weight_decay,
        adam_beta2=0.98,
        adam_epsilon=1e-7,
    )
    params = shaped(arrays(0))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(STEPS):
        rate = jnp.float32(0.01 / (step + 1))
        params, state = update(shaped(arrays(step + 1)), state, params, rate)
    return {n: np.asarray(p) for n, p in params.items()}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "lion_32bit"])
def test_equals_reference(optim: str, weight_decay: float) -> None:
    theirs = lion_run(weight_decay) if "lion" in optim else torch_run(optim, weight_decay)
    ours = our_run(optim, weight_decay)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, atol=2e-6, err_msg=name)
        assert np.abs(ours[name] - arrays(0)[name]).max() > 1e-3


@pytest.mark.parametrize("optim", ["adamw", "sgd", "adafactor", "lion"])
def test_stacked_equals_unstacked(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = our_run(optim, 0.1, stacked=3)
    plain = arrays

    for layer in range(3):

        def scaled(seed: int, layer: int = layer) -> dict[str, np.ndarray]:
            return {n: a * (layer + 1) for n, a in plain(seed).items()}

        monkeypatch.setitem(our_run.__globals__, "arrays", scaled)
        single = our_run(optim, 0.1)
        for name in SHAPES:
            np.testing.assert_allclose(stacked[name][layer], single[name], rtol=1e-6, atol=1e-7)


def test_decay_names_are_those_of_the_trainer() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=16,
        )
    )  # fmt: skip
    bert = BertModel(
        BertConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=16,
        )
    )  # fmt: skip
    for model in (llama, bert):
        theirs = Trainer.get_decay_parameter_names(None, model)  # uses no state of the trainer
        assert decay_parameter_names(model) == set(theirs)
        assert 0 < len(theirs) < len(list(model.parameters()))


def test_decay_keys_follow_the_layout() -> None:
    layout = {"layers.*.q.weight": ("layers.0.q.weight", "layers.1.q.weight"), "b": ("b",)}
    names = frozenset({"layers.0.q.weight", "layers.1.q.weight"})
    assert decay_keys(layout, layout_keys=layout, decay_names=names) == {"layers.*.q.weight"}


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="8-bit and 4-bit"):
        make_optimizer("adamw_8bit")
    with pytest.raises(ConfigError, match="Did you mean 'adafactor'"):
        make_optimizer("adafacto")
