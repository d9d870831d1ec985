"""Sizes that depend on values, against eager PyTorch: values and gradients, and what is refused."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
import torch
import zoo
from torch import nn

import headrace as hr
from headrace.errors import CaptureError


class Experts(nn.Module):
    """The loop of transformers' mixtures: experts that were hit, tokens by mask."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(8, experts)
        self.weight = nn.Parameter(torch.randn(experts, 8, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = self.gate(x).softmax(-1).topk(1)
        # One more class, as for padding: a place that is never hit and has no weight.
        mask = nn.functional.one_hot(chosen, self.experts + 1).permute(2, 1, 0)
        out = torch.zeros_like(x)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            slot, token = torch.where(mask[expert])
            if token.numel() == 0:
                continue
            rows = nn.functional.gelu(x[token] @ self.weight[expert])
            out.index_add_(0, token, rows * values[token, slot, None])
        return x + out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_experts_that_get_no_token_change_nothing() -> None:
    torch.manual_seed(0)
    # Six tokens that are alike leave an expert without any.
    x = torch.randn(1, 8).expand(6, 8) + 0.01 * torch.randn(6, 8)
    report = hr.check(Stack(), (x,), operators=False, dynamic=False)
    assert report.ok, str(report)
    assert any("loop of 2" in note for note in report.loops), report.loops


class Selected(nn.Module):
    """Rows by mask: written back, given to a loss, summed, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        mask = labels > 2
        first, second = torch.where(mask)
        rows = x[mask]
        loss = nn.functional.cross_entropy(rows, labels[mask])
        written = torch.zeros_like(x)
        written[first, second] = rows.tanh()
        again = x.clone()
        again[mask] = nn.functional.layer_norm(rows, (8,))
        flat = rows.view(-1).sum() / 7 + rows.mean() + rows.mean(0).pow(2).sum()
        return loss + flat + (written * again).sum() + rows.norm(dim=-1).sum()


def _labelled() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(3)
    return torch.randn(3, 5, 8, generator=make), torch.randint(0, 8, (3, 5), generator=make)


def test_selected_rows_are_exact_for_any_number_of_them() -> None:
    torch.manual_seed(0)
    model, (x, labels) = Selected(), _labelled()
    report = hr.check(model, (x, labels), operators=True)  # writes of rows that are not real too
    assert report.ok and not report.disagreements, str(report)
    jm = hr.to_jax(model, (x, labels))
    params = jm.params()
    value = jax.jit(jax.value_and_grad(lambda p, y: jm.apply(p, {}, x.numpy(), y)[0]))
    for other in (
        labels.clamp(max=3),
        torch.full_like(labels, 7),
        labels * (labels == labels.max()),
    ):
        model.zero_grad()
        want = model(x, other)
        want.backward()
        found, gradients = value(params, other.numpy())
        np.testing.assert_allclose(found, want.item(), rtol=1e-5)
        np.testing.assert_allclose(
            gradients["linear.weight"], model.linear.weight.grad, rtol=1e-4, atol=1e-5
        )


class Sorted(nn.Module):
    """Tokens sorted by expert and split into pieces of as many rows as each got (JetMoe)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        order = expert.argsort()
        sizes = nn.functional.one_hot(expert, 3).sum(0).tolist()
        parts = [e(p) for e, p in zip(self.experts, x[order].split(sizes), strict=True)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(parts).tanh())


def test_pieces_of_counted_sizes_join_again() -> None:
    torch.manual_seed(0)
    x, expert = torch.randn(7, 8), torch.tensor([2, 0, 0, 2, 2, 0, 2])
    report = hr.check(Sorted(), (x, expert), operators=False)
    assert report.ok, str(report)


class LastOfEach(nn.Module):
    """The last marked token of each row, as transformers' encoder-decoders classify."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embed(ids)[ids == 2].view(ids.shape[0], -1, 4)
        return rows[:, -1] * rows[:, 0]


def test_selected_rows_shared_equally_are_exact_for_any_number_of_them() -> None:
    model = LastOfEach()
    ids = torch.tensor([[1, 2, 3, 2, 5], [2, 4, 2, 6, 7]])
    one = torch.tensor([[1, 3, 3, 2, 5], [2, 4, 8, 6, 7]])
    module = hr.to_jax(model, (ids,))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def objective(params: dict[str, jax.Array], batch: np.ndarray) -> tuple[jax.Array, jax.Array]:
        outputs = module.apply(params, {}, batch)[0]
        return (outputs**2).sum(), outputs

    for given in (ids, one):
        want = model(given)
        (gradient,) = torch.autograd.grad((want**2).sum(), model.embed.weight)

        (_, got), ours = objective(module.params(), given.numpy())
        np.testing.assert_allclose(got, want.detach(), rtol=1e-6)
        np.testing.assert_allclose(ours["embed.weight"], gradient, rtol=1e-5, atol=1e-6)
    uneven = np.array([[2, 2, 3, 2, 5], [1, 4, 8, 6, 7]])
    with pytest.raises(Exception, match="shares the selected rows equally"):
        jax.block_until_ready(objective(module.params(), uneven))


class Asks(nn.Module):
    """Asks whether there is a row, and does something else when there is none (DeBERTa's loss)."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = (labels >= 0).nonzero()
        if chosen.size(0) > 0:
            return torch.gather(x, 0, chosen.expand(chosen.size(0), x.size(1))).sum()
        return torch.tensor(0.0)


def test_the_other_case_of_a_question_about_sizes_raises_when_it_comes() -> None:
    x, labels = torch.randn(5, 3), torch.tensor([1, -1, 0, -1, 2])
    jm = hr.to_jax(Asks(), (x, labels), dynamic=False)
    run = jax.jit(lambda y: jm.apply({}, {}, x.numpy(), y)[0])
    np.testing.assert_allclose(run(labels.numpy()), x[labels >= 0].sum(), rtol=1e-5)
    with pytest.raises(Exception, match="the program is for masks that do"):
        jax.block_until_ready(run(-np.ones(5, np.int32)))
        jax.effects_barrier()


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].softmax(0).sum()


class Returns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0] * 2


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] > 0]
        return rows.sum() / rows.shape[0] ** 0.5


class Accumulates(nn.Module):
    """A turn that adds something although its place selects nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for place in (x[:, 0] > 0).nonzero():
            out.add_(x[place])
        return out


class Carries(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for place in (x[:, 0] > 0).nonzero():
            total = total + x[place].sum()
        return total


class AsksOther(nn.Module):
    """Writes the rows of one mask, unless another selects nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for place in (x[:, 0] > 0).nonzero():
            (first,) = torch.where(x[:, 1] > 0)
            if first.numel() == 0:
                continue
            (second,) = torch.where(x[:, 2] > 0)
            out.index_add_(0, second, x[second] * x[place])
        return out


def test_a_turn_that_goes_on_early_writes_nothing() -> None:
    model, x = AsksOther(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    jm = hr.to_jax(model, (x,), dynamic=False)
    for case in (x, x * torch.tensor([1.0, 0, 1]), x * torch.tensor([1.0, 1, 0]), -x.abs()):
        found = jm.apply({}, {}, case.numpy())[0]
        np.testing.assert_allclose(found, model(case), rtol=1e-5, atol=1e-6)


class AsksLate(nn.Module):
    """Asks about one mask when it has selected with another: refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for place in (x[:, 0] > 0).nonzero():
            (second,) = torch.where(x[:, 2] > 0)
            (first,) = torch.where(x[:, 1] > 0)
            if first.numel() == 0:
                continue
            out.index_add_(0, second, x[second] * x[place])
        return out


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AsksLate, "has selected with a third one"),
        (Mixes, "aten.softmax.int .* mixes rows"),
        (Returns, "is a result of the model"),
        (Counts, "as a number"),
        (Accumulates, "leaves a loop"),
        (Carries, "takes total from one turn to the next"),
    ],
)
def test_what_would_see_the_padding_is_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        hr.to_jax(kind(), (torch.randn(4, 3),), dynamic=False)
    assert "test_bounded.py" in str(caught.value), "the line is named"


def test_xmod_adapters_by_language() -> None:
    model, inputs = zoo.build("masked-lm", "xmod")
    report = hr.check(model, inputs, operators=False, dynamic=False)
    assert report.ok, str(report)
