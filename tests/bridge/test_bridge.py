"""What the bridge promises for any module: names, buffers, randomness, dynamic shapes, errors."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import build
from torch import nn
from torch.nn import functional as F

import headrace as hr
from headrace.errors import CaptureError, UnsupportedOpsError


class Tied(nn.Module):
    """Two names for one weight, and positional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.out(self.embed(ids)) * scale


class WithDropout(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.ones_like(layer(x)), self.p, self.training)
        return x


def test_tied_weights_are_one_parameter_with_the_sum_of_gradients() -> None:
    model = Tied()
    ids = torch.tensor([[1, 2, 3]])
    report = hr.check(model, ((ids,), {"scale": 2.0}))
    assert report.ok, str(report)
    jm = hr.to_jax(model, (ids,))
    assert list(jm.layout.keys) == ["embed.weight"]
    assert jm.layout.tied == {"out.weight": "embed.weight"}


def test_one_capture_serves_every_batch_and_length() -> None:
    model, inputs = build("llama")
    jm = hr.to_jax(model, inputs)
    assert jm.program.dynamic
    for rows, length in ((1, 7), (3, 21)):
        ids = torch.randint(3, 96, (rows, length))
        mask = torch.ones_like(ids)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, labels=ids)
        got = jm(input_ids=ids.numpy(), attention_mask=mask.numpy(), labels=ids.numpy())
        assert type(got) is type(expected)
        np.testing.assert_allclose(got.logits, expected.logits.numpy(), atol=2e-5)
        np.testing.assert_allclose(got.loss, expected.loss.numpy(), rtol=1e-5)


def test_batch_norm_statistics_are_new_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    x = torch.randn(2, 3, 8, 8)
    jm = hr.to_jax(model, (x,))
    buffers = jm.buffers()
    _, new = jm.apply(jm.params(), buffers, x.numpy())
    model(x)
    for name, value in model.named_buffers():
        np.testing.assert_allclose(new[name], value.numpy(), rtol=1e-5, err_msg=name)
    _, same = jm.apply(jm.params(), buffers, x.numpy(), train=False)
    np.testing.assert_array_equal(same["1.running_mean"], buffers["1.running_mean"])


def test_evaluation_mode_of_a_training_capture_equals_eager_eval() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.7)).train()
    model[1].running_mean.normal_()
    x = torch.randn(6, 5)
    jm = hr.to_jax(model, (x,))
    got, _ = jm.apply(jm.params(), jm.buffers(), x.numpy(), train=False)
    with torch.no_grad():
        np.testing.assert_allclose(got, model.eval()(x).numpy(), rtol=1e-5, atol=1e-6)


def test_dropout_draws_from_the_key_and_differs_between_layers() -> None:
    model = WithDropout().train()
    jm = hr.to_jax(model, (torch.ones(4, 64),))
    params, buffers, x = jm.params(), jm.buffers(), jnp.ones((4, 64))
    a, _ = jm.apply(params, buffers, x, rng=jax.random.key(0))
    b, _ = jm.apply(params, buffers, x, rng=jax.random.key(0))
    c, _ = jm.apply(params, buffers, x, rng=jax.random.key(1))
    np.testing.assert_array_equal(a, b)
    assert (np.asarray(a) != np.asarray(c)).any()
    assert set(np.unique(a)) == {0.0, 2.0}
    assert 0.35 < float((a == 0).mean()) < 0.65
    with pytest.raises(ValueError, match="no key"):
        jm.apply(params, buffers, x)


def test_layers_in_a_loop_draw_different_masks() -> None:
    class Collect(WithDropout):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [F.dropout(layer(x) * 0 + 1, 0.5, self.training) for layer in self.layers]

    jm = hr.to_jax(Collect().train(), (torch.ones(4, 64),))
    outputs, _ = jm.apply(jm.params(), jm.buffers(), jnp.ones((4, 64)), rng=jax.random.key(0))
    masks = {np.asarray(o).tobytes() for o in outputs}
    assert len(masks) == 3


def test_compile_returns_torch_and_follows_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train()
    twin = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train()
    twin.load_state_dict(model.state_dict())
    compiled = hr.compile(model)
    for _ in range(2):
        x = torch.randn(6, 5)
        torch.testing.assert_close(compiled(x), twin(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model[1].running_var, twin[1].running_var)
        with torch.no_grad():
            model[0].weight.mul_(1.5)
            twin[0].weight.mul_(1.5)


def test_compile_gives_torch_gradients_to_parameters_and_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).train()
    model[3].bias.requires_grad_(False)
    twin = copy.deepcopy(model)
    compiled = hr.compile(twin)
    x = torch.randn(6, 5, requires_grad=True)
    x_twin = x.detach().clone().requires_grad_()
    for _ in range(2):  # the second backward adds to the first
        (model(x) ** 2).sum().backward()
        (compiled(x_twin) ** 2).sum().backward()
    torch.testing.assert_close(x_twin.grad, x.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(twin[1].running_var, model[1].running_var)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    with pytest.raises(CaptureError, match="first derivatives only"):
        torch.autograd.grad(compiled(x_twin).sum(), x_twin, create_graph=True)


def test_compile_keeps_the_hugging_face_output_class() -> None:
    model, inputs = build("bert")
    model.eval()
    with torch.no_grad():
        expected = model(**inputs)
    got = hr.compile(model)(**inputs)
    assert type(got) is type(expected)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_layout_round_trip_gives_back_every_name() -> None:
    model, inputs = build("gemma3")
    jm = hr.to_jax(model, inputs)
    stored = jm.params()
    names = jm.layout.unstack(stored)
    assert set(names) == {n for n, _ in model.named_parameters()}
    again = jm.layout.stack(names)
    assert stored.keys() == again.keys()
    for key in stored:
        np.testing.assert_array_equal(stored[key], again[key])
    assert stored["model.layers.[0:5:4].self_attn.q_proj.weight"].shape[0] == 2


@pytest.mark.parametrize("policy", ["full", "dots", "attention", "offload"])
def test_remat_changes_memory_not_values(policy: str) -> None:
    model, inputs = build("llama")
    jm = hr.to_jax(model, inputs)
    arrays = {k: v.numpy() for k, v in inputs.items()}
    params, buffers = jm.params(), jm.buffers()

    def gradient(remat: str):
        def loss(p):
            return jm.apply(p, buffers, remat=remat, **arrays)[0].loss

        return jax.jit(jax.grad(loss))(params)

    plain, recomputed = gradient("none"), gradient(policy)
    for key in plain:
        np.testing.assert_allclose(plain[key], recomputed[key], rtol=1e-5, atol=1e-7)


def test_segments_isolate_packed_examples() -> None:
    model, _ = build("llama")
    model.eval()
    a, b = torch.randint(3, 96, (1, 5)), torch.randint(3, 96, (1, 6))
    packed = torch.cat([a, b], 1)
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    jm = hr.to_jax(model, {"input_ids": packed, "position_ids": positions})
    with torch.no_grad():
        alone = torch.cat([model(input_ids=x).logits for x in (a, b)], 1)
    got = jm(input_ids=packed.numpy(), position_ids=positions.numpy())
    np.testing.assert_allclose(got.logits, alone.numpy(), atol=2e-5)


def test_head_pass_gives_hidden_states_and_the_same_logits() -> None:
    model, inputs = build("gemma2")
    jm = hr.to_jax(model, {"input_ids": inputs["input_ids"]})
    whole = jm(input_ids=inputs["input_ids"].numpy()).logits
    body, head = jm.without_head()
    hidden = body(input_ids=inputs["input_ids"].numpy()).logits
    assert hidden.shape[-1] == 32
    assert head.tail is not None, "gemma 2 caps its logits"
    np.testing.assert_allclose(head.logits(jm.params(), hidden), whole, atol=1e-5)


def test_unsupported_operators_are_listed_with_their_place() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x).real + torch.linalg.ldl_factor_ex(x).LD.sum()

    with pytest.raises(UnsupportedOpsError) as error:
        hr.to_jax(Odd(), (torch.randn(3, 3),))
    assert "has no JAX rule" in str(error.value) or "have no JAX rule" in str(error.value)
    assert "aten." in str(error.value)
    assert "Odd" in str(error.value)


def test_data_dependent_python_is_refused_with_its_reason() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if self.weight.sum() > 0 else x - 1

    with pytest.raises(CaptureError, match=r"self\.weight\.sum\(\) > 0.*a parameter"):
        hr.to_jax(Branch(), (torch.ones(3),))


def test_wrong_inputs_name_the_argument() -> None:
    model, inputs = build("bert")
    jm = hr.to_jax(model, inputs)
    arrays = {k: v.numpy() for k, v in inputs.items()}
    with pytest.raises(TypeError, match="input_ids"):
        jm(**{**arrays, "input_ids": arrays["input_ids"].astype(np.float32)})
    with pytest.raises(TypeError, match="missing: labels"):
        jm(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"])
    with pytest.raises(TypeError, match="object"):
        hr.to_jax(model, {"input_ids": object()})


def test_meta_weights_are_refused_where_values_are_needed() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    jm = hr.to_jax(layer, (torch.zeros(2, 3, device="meta"),))
    with pytest.raises(CaptureError, match="meta"):
        jm.params()
    out, _ = jm.apply({"weight": jnp.ones((2, 3)), "bias": jnp.zeros(2)}, {}, jnp.ones((4, 3)))
    np.testing.assert_array_equal(out, np.full((4, 2), 3.0))


def test_check_names_the_first_operator_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace as changed

    from headrace.bridge import lower

    real = lower.lookup
    silu = torch.ops.aten.silu.default

    def wrong(op: object) -> object:
        rule = real(op)
        if op is silu and rule is not None:
            return changed(rule, function=lambda x: rule.function(x) * 1.01)
        return rule

    monkeypatch.setattr(lower, "lookup", wrong)
    model, inputs = build("llama")
    report = hr.check(model, inputs)
    assert not report.ok
    first = report.disagreements[0]
    assert first.operator == "aten.silu.default"
    assert "layers.0.mlp" in first.module
    assert {d.operator for d in report.disagreements} == {"aten.silu.default"}


def test_layers_that_stay_alone_are_recomputed_too() -> None:
    model, inputs = build("gemma4-e")
    jm = hr.to_jax(model, inputs)
    arrays = {k: v.numpy() for k, v in inputs.items()}
    params, buffers = jm.params(), jm.buffers()

    def saved(remat: str) -> int:
        def loss(p):
            return jm.apply(p, buffers, remat=remat, **arrays)[0].loss

        lowered = jax.jit(jax.grad(loss)).lower(params)
        return lowered.as_text().count("dot_general")

    assert saved("full") > saved("none") + 4, "a recomputed layer repeats its matmuls"


def test_peft_wrapper_keeps_dynamic_shapes() -> None:
    from peft import LoraConfig, get_peft_model

    model, inputs = build("llama")
    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    jm = hr.to_jax(wrapped, {"input_ids": inputs["input_ids"]})
    assert jm.program.dynamic
    assert len(jm.program.loops) == 1
    _, head = jm.without_head()
    assert head.weight_key.endswith("lm_head.weight")


class AsksForGpu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3, device="cuda")


@pytest.mark.parametrize(
    ("module", "x", "advice"),
    [
        (AsksForGpu(), torch.ones(2, 3), r"Drop \.cuda\(\)"),
        (nn.Linear(3, 2), torch.ones(2, 4), r"the model's own error"),
    ],
)
def test_a_refused_capture_says_what_to_do(module: nn.Module, x: torch.Tensor, advice: str) -> None:
    with pytest.raises(CaptureError, match=advice):
        hr.to_jax(module, (x,))
