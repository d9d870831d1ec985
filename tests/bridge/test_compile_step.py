"""`hr.compile_step` against the same step run by eager PyTorch, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional as F

import headrace as hr
from headrace.errors import CaptureError

STEPS = 50


class Cnn(nn.Module):
    """The size of PyTorch's FashionMNIST tutorial, with smaller layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(F.relu(self.conv(x))).flatten(1))


class Residual(nn.Module):
    """ResNet's block between a stem and a head, with batch norm in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm2(self.conv(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embed(ids)))


def batches(shape: tuple[int, ...], classes: int, labels: tuple[int, ...]) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(7)

    def draw() -> Any:
        x = torch.randn(shape, generator=generator)
        return x, torch.randint(0, classes, labels, generator=generator)

    return draw


def ordinary(model: nn.Module, optimizer: Any, **clip: float) -> Callable[..., Any]:
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), **clip)
        optimizer.step()
        return loss

    return train_step


def assert_same(left: Any, right: Any, tolerance: float) -> None:
    """Equal state_dicts, up to `tolerance` of the largest entry of each tensor."""
    for (name, a), (other, b) in zip(left.items(), right.items(), strict=True):
        assert name == other
        assert a.dtype == b.dtype, name
        scale = max(float(a.abs().max()), 1e-2) if a.numel() else 1.0
        difference = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


def optimizer_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{k}": v
        for i, s in sorted(state.items())
        for k, v in sorted(s.items())
        if v is not None
    }


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_agree_with_eager_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "muon":
        # Its iterations in bfloat16 magnify rounding in the null space of a gradient: in float64,
        # and with gradients of full rank, everything must agree.
        for kind in (torch.Tensor, FunctionalTensor):
            monkeypatch.setattr(kind, "bfloat16", lambda self: self.double())
    with jax.enable_x64(name == "muon"):
        compare_with_eager(name, torch.float64 if name == "muon" else torch.float32)


def compare_with_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    twin = copy.deepcopy(model)
    eager_optimizer = OPTIMIZERS[name](list(model.parameters()))
    optimizer = OPTIMIZERS[name](list(twin.parameters()))
    eager = ordinary(model, eager_optimizer, max_norm=0.5)
    compiled = hr.compile_step(
        ordinary(twin, optimizer, max_norm=0.5), model=twin, optimizer=optimizer
    )
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, 100) for o in (eager_optimizer, optimizer)
    ]
    draw = batches((4, 6), 3, (4,))
    for _ in range(STEPS):
        x, y = draw()
        x = x.to(dtype)
        expected, got = eager(x, y), compiled(x, y)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=2e-5)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(model.state_dict(), twin.state_dict(), 5e-5)
    assert_same(optimizer_tensors(eager_optimizer), optimizer_tensors(optimizer), 1e-4)
    # The first step of SGD with dampening is another one. Muon has no biases, so its zero_grad
    # leaves theirs, and from the second step on they are added to.
    assert compiled.programs == (2 if name in ("dampening", "muon") else 1)


@pytest.mark.parametrize("mode", ["one_program", "two_programs"])
@pytest.mark.parametrize("kind", ["cnn", "residual", "transformer"])
def test_models_agree_with_eager_torch(kind: str, mode: Any) -> None:
    torch.manual_seed(0)
    model, draw = {
        "cnn": (Cnn(), batches((3, 1, 28, 28), 10, (3,))),
        "residual": (Residual(), batches((4, 3, 6, 6), 5, (4,))),
        "transformer": (Transformer(), None),
    }[kind]
    if draw is None:
        generator = torch.Generator().manual_seed(3)

        def draw() -> Any:
            ids = torch.randint(0, 17, (2, 7), generator=generator)
            return ids[:, :-1], ids[:, 1:]

    with jax.enable_x64(kind == "transformer"):
        # In float64 on both sides: layer norm and Adam magnify float32's rounding over 50 steps.
        model = model.double() if kind == "transformer" else model
        twin = copy.deepcopy(model)
        eager_optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        eager = ordinary(model, eager_optimizer)
        compiled = hr.compile_step(
            ordinary(twin, optimizer), model=twin, optimizer=optimizer, mode=mode
        )
        for _ in range(STEPS if mode == "one_program" else 5):
            x, y = draw()
            x = x.double() if kind == "transformer" and x.is_floating_point() else x
            expected, got = eager(x, y), compiled(x, y)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-4)
        assert_same(model.state_dict(), twin.state_dict(), 2e-4)
    assert all(p.grad is not None for p in twin.parameters())


def test_gan_with_two_models_and_two_optimizers() -> None:
    torch.manual_seed(0)

    def build() -> tuple[nn.ModuleDict, list[Any], Callable[..., Any]]:
        torch.manual_seed(0)
        g, d = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
        g_optimizer = torch.optim.Adam(g.parameters(), lr=1e-2, betas=(0.5, 0.9))
        d_optimizer = torch.optim.RMSprop(d.parameters(), lr=1e-3)
        bce = nn.BCEWithLogitsLoss()

        def train_step(real: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = g(noise)
            d_optimizer.zero_grad()
            d_loss = bce(d(real), ones) + bce(d(fake.detach()), zeros)
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            g_loss = bce(d(fake), ones)
            g_loss.backward()
            g_optimizer.step()
            return {"d": d_loss, "g": g_loss}

        return nn.ModuleDict({"g": g, "d": d}), [g_optimizer, d_optimizer], train_step

    models, _, eager = build()
    twins, optimizers, step = build()
    compiled = hr.compile_step(step, model=dict(twins.items()), optimizer=optimizers)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        real = torch.randn(5, 3, generator=generator)
        noise = torch.randn(5, 2, generator=generator)
        expected, got = eager(real, noise), compiled(real, noise)
    for name in ("d", "g"):
        np.testing.assert_allclose(got[name].item(), expected[name].item(), rtol=1e-4)
    assert_same(models.state_dict(), twins.state_dict(), 2e-4)


def test_accumulation_by_hand_carries_gradients_between_calls() -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def micro_step(x: torch.Tensor, y: torch.Tensor, update: bool, scale: float) -> Any:
            loss = F.cross_entropy(model(x), y) * scale
            (loss / 4).backward()
            if update:
                for p in model.parameters():
                    p.grad.div_(scale)
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, micro_step

    model, _, eager = build()
    twin, optimizer, step = build()
    compiled = hr.compile_step(step, model=twin, optimizer=optimizer)
    draw = batches((4, 6), 3, (4,))
    for i in range(STEPS):
        x, y = draw()
        scale = 2.0 ** (i // 4 % 5)
        expected, got = eager(x, y, i % 4 == 3, scale), compiled(x, y, i % 4 == 3, scale)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-4)
    assert_same(model.state_dict(), twin.state_dict(), 1e-4)
    assert compiled.programs == 3  # first micro-batch, later ones, and the one that updates


def test_dropout_draws_anew_follows_the_seed_and_keeps_the_mean() -> None:
    model = nn.Sequential(nn.Dropout(0.25))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) * model.scale

    compiled = hr.compile_step(step, model=model)
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    model.train(False)
    assert torch.equal(compiled(x), x)
    assert compiled.programs == 2  # what a module's mode changes is another program
    assert abs(float((first == 0).double().mean()) - 0.25) < 0.03
    torch.testing.assert_close(first.unique(), torch.tensor([0.0, 1 / 0.75]))


def small() -> tuple[nn.Module, Any, Callable[..., Any]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, ordinary(model, optimizer)


def test_state_is_visible_and_replaceable_between_calls() -> None:
    model, optimizer, step = small()
    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    compiled(x, y)
    saved, saved_optimizer = (
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
    )
    expected = F.cross_entropy(model(x), y)  # an eager forward sees the new weights
    after = compiled(x, y)
    np.testing.assert_allclose(after.item(), expected.item(), rtol=1e-5)
    for _ in range(3):
        compiled(x, y)
    model.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    np.testing.assert_allclose(compiled(x, y).item(), expected.item(), rtol=1e-5)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2.0
    assert torch.equal(model.weight, model.state_dict()["weight"])
    with torch.no_grad():
        model.weight.zero_()  # up to date, so the change counts
        model.bias.zero_()
    np.testing.assert_allclose(compiled(x, y).item(), np.log(2), rtol=1e-5)
    assert compiled.programs == 1


def _clamps(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)  # counts in no version


def _scales(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.weight.mul_(2.0)


def _forgets(model: Any, optimizer: Any) -> None:
    optimizer.state[model.weight]["exp_avg"].zero_()
    optimizer.state[model.weight]["step"].fill_(0.0)


def _freezes(model: Any, optimizer: Any) -> None:
    model.bias.requires_grad_(False)


def _copies(model: Any, optimizer: Any) -> None:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    assert type(twin.weight) is type(pickle.loads(pickle.dumps(model)).weight) is nn.Parameter
    with torch.no_grad():
        model.bias.copy_(twin.weight.norm() + model.weight.grad.sum())


@pytest.mark.parametrize("change", [_clamps, _scales, _forgets, _freezes, _copies])
def test_whatever_is_done_to_tensors_between_calls_counts(change: Callable[..., None]) -> None:
    runs = [small(), small()]
    model, optimizer, step = runs[0]
    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    eager_model, eager_optimizer, eager = runs[1]
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for _ in range(2):
        for _ in range(2):
            loss, expected = compiled(x, y), eager(x, y)
        np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
        change(model, optimizer)
        change(eager_model, eager_optimizer)
    compiled(x, y), eager(x, y)
    for got, wanted in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # no sync() before
    assert type(model.weight) is nn.Parameter


def test_a_call_looks_at_no_tensor_and_looking_at_shapes_copies_nothing() -> None:
    model, optimizer, step = small()
    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for _ in range(3):
        compiled(x, y)
        optimizer.zero_grad()
        assert model.weight.shape == (2, 3)
        assert all(p.requires_grad for p in model.parameters())
        assert compiled.owned  # the values are still on the device, and nowhere else
        model.train(not model.training)  # which a linear layer does not look at
    assert compiled.programs == 1
    del compiled  # the tensors keep what has their values
    assert float(optimizer.state[model.weight]["step"]) == 3.0


def test_a_write_through_a_view_made_earlier_is_told() -> None:
    model, optimizer, step = small()
    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    view = model.weight.detach()
    compiled(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    view.mul_(2.0)
    with pytest.warns(UserWarning, match=r"weight changed in place, by a view.*lost"):
        compiled.sync()


@pytest.mark.parametrize("mode", ["one_program", "two_programs"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_loss_scaler_skips_grows_and_backs_off_as_in_eager_torch(kind: str, mode: Any) -> None:
    def build() -> tuple[nn.Module, Any, Any, Callable[..., Any]]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.5)))
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)

        def step(x: torch.Tensor, y: torch.Tensor, large: float) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x) * model.temperature, y)
            scaler.scale(loss * large).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return model, optimizer, scaler, step

    reference, reference_optimizer, reference_scaler, eager = build()
    model, optimizer, scaler, step = build()
    compiled = hr.compile_step(step, model=model, optimizer=optimizer, mode=mode)
    draw = batches((4, 5), 3, (4,))
    for i in range(14):
        x, y = draw()
        large = 1e36 if i in (0, 4, 5, 11) else 1.0  # times the scale: gradients become inf
        expected, got = eager(x, y, large), compiled(x, y, large)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-5)
        if i == 8:
            assert scaler.get_scale() == reference_scaler.get_scale()
    assert scaler.state_dict() == reference_scaler.state_dict()
    assert_same(reference.state_dict(), model.state_dict(), 1e-5)
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same(reference_optimizer.state[wanted], optimizer.state[got], 1e-4)
    assert compiled.programs == 1


def test_a_loss_scaler_without_update_is_refused() -> None:
    model, optimizer, _ = small()
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)

    with pytest.raises(CaptureError, match=r"scaler\.update\(\) inside the step"):
        hr.compile_step(step, model=model, optimizer=optimizer)(torch.ones(4, 3))


def test_two_steps_on_one_model_hand_the_parameters_over() -> None:
    model, optimizer, step = small()
    reference, _, eager = small()
    a = hr.compile_step(step, model=model, optimizer=optimizer)
    b = hr.compile_step(lambda x, y: step(x, y) * 2, model=model, optimizer=optimizer)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for run in (a, b, a, b, b):
        run(x, y)
        eager(x, y)
    assert_same(reference.state_dict(), model.state_dict(), 1e-5)
    torch.testing.assert_close(hr.compile(model)(x), reference(x), rtol=1e-4, atol=1e-5)


def test_windows_of_a_transposed_tensor_are_those_of_its_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    eager = copy.deepcopy(model)

    def make(model: nn.Module, optimizer: torch.optim.Optimizer):
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            turned = model(x).t()  # [4, 5], and its memory still holds the rows of x
            windows = turned.as_strided((3, 2, 4), (4, 4, 1))
            loss = (windows * torch.arange(24.0).reshape(3, 2, 4)).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, eager)]
    compiled = hr.compile_step(make(model, optimizers[0]), model=model, optimizer=optimizers[0])
    x = torch.randn(5, 3)
    for _ in range(2):
        np.testing.assert_allclose(
            compiled(x).item(), make(eager, optimizers[1])(x).item(), rtol=1e-5
        )
    assert_same(eager.state_dict(), model.state_dict(), 1e-5)


def test_unused_parameters_stay_as_they_are() -> None:
    model, reference = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), None
    reference = copy.deepcopy(model)
    runs = []
    for m in (model, reference):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5)
        runs.append((m, optimizer, ordinary(m[0], optimizer)))
    compiled = hr.compile_step(runs[0][2], model=model, optimizer=runs[0][1])
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for _ in range(3):
        compiled(x, y)
        runs[1][2](x, y)
    assert_same(reference.state_dict(), model.state_dict(), 1e-5)
    assert runs[0][1].state_dict()["state"].keys() == runs[1][1].state_dict()["state"].keys()


kept: list[Any] = []
counter = 0
average = torch.zeros(2)


def _keeps(loss: torch.Tensor) -> None:
    kept.append(loss * 1)


def _branches(loss: torch.Tensor) -> None:
    if loss.item() > 1:
        loss.add_(1)


def _counts(loss: torch.Tensor) -> None:
    global counter
    counter += 1


def _writes(loss: torch.Tensor) -> None:
    average.mul_(0.9).add_(loss.detach())


def _sizes(loss: torch.Tensor) -> None:
    loss[None].nonzero()


def _seeds(loss: torch.Tensor) -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (_keeps, r"kept outside it"),
        (_branches, r"depends on a value that only the device knows"),
        (_counts, r"counter: 0 -> 1"),
        (_writes, r"no module owns, by `mul_`"),
        (_sizes, r"depends on a value that only the device knows"),
        (_seeds, r"the step calls torch\.manual_seed"),
    ],
)
def test_what_a_trace_cannot_see_is_refused_with_its_line(action: Any, message: str) -> None:
    global counter
    kept.clear()
    counter = 0
    model, optimizer, _ = small()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        global counter
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if action is _counts:
            counter += 1
        else:
            action(loss)
        loss.backward()
        optimizer.step()
        return loss

    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    weight = model.weight
    with pytest.raises(CaptureError, match=message) as error:
        compiled(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert "test_compile_step.py" in str(error.value)
    assert model.weight is weight
    assert optimizer.param_groups[0]["lr"] == 0.1
    model(torch.randn(4, 3)).sum().backward()  # the model still runs eagerly


def test_bad_arguments() -> None:
    model, optimizer, step = small()
    with pytest.raises(TypeError, match="mode='three' is not known"):
        hr.compile_step(step, model=model, optimizer=optimizer, mode="three")  # pyright: ignore
    with pytest.raises(TypeError, match=r"give torch\.optim optimizers"):
        hr.compile_step(step, model=model, optimizer=[model])  # pyright: ignore
    compiled = hr.compile_step(step, model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"\[0\]\[1\] is a object"):
        compiled(torch.randn(4, 3), object())
    with pytest.raises(TypeError, match=r"torch\.sparse_coo tensor"):
        compiled(torch.randn(4, 3).to_sparse(), torch.tensor([0]))
    meta = nn.Linear(3, 2, device="meta")
    compiled = hr.compile_step(lambda x: meta(x), model=meta)
    with pytest.raises(CaptureError, match="weight is on the meta device"):
        compiled(torch.randn(4, 3))
    stranger = nn.Parameter(torch.ones(3))
    compiled = hr.compile_step(lambda x: (x * stranger).sum().backward(), model=model)
    with pytest.raises(CaptureError, match="belongs to no module or optimizer"):
        compiled(torch.randn(4, 3))


class Sign(torch.autograd.Function):
    """The sign forward, the identity backward: a rule no forward graph tells."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_custom_functions_hooks_second_derivatives_and_closure_tensors() -> None:
    def build() -> tuple[nn.Module, Callable[..., Any], torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mask = torch.tensor([1.0, 0.0, 1.0])
        model[2].weight.register_hook(lambda gradient: gradient * 0.5)

        def train_step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            x = (x * mask).requires_grad_()
            out = model(x) + Sign.apply(model[0].weight).sum() + model[2].bias.detach() ** 2
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (out**2).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, train_step, mask

    model, eager, mask = build()
    twin, step, twin_mask = build()
    compiled = hr.compile_step(step, model=twin, optimizer=compiled_optimizer(step))
    generator = torch.Generator().manual_seed(2)
    for i in range(6):
        if i == 3:
            mask.fill_(0.5)
            twin_mask.fill_(0.5)
        x = torch.randn(5, 3, generator=generator)
        expected, got = eager(x), compiled(x)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-4)
    assert_same(model.state_dict(), twin.state_dict(), 1e-4)
    assert compiled.programs == 1


def compiled_optimizer(step: Callable[..., Any]) -> Any:
    """The optimizer that a step closes over."""
    cells = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))
    return cells["optimizer"].cell_contents


def test_code_that_asks_for_a_gpu_is_named() -> None:
    model = nn.Linear(3, 2)
    compiled = hr.compile_step(lambda x: model(x) + torch.ones(2, device="cuda"), model=model)
    with pytest.raises(CaptureError, match=r"asks for a GPU(.|\n)*test_compile_step\.py"):
        compiled(torch.ones(4, 3))
