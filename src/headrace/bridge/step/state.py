"""What a training step owns: parameters, buffers, gradients, optimizer state, hyperparameters.

An `Inventory` lists the torch tensors of the user's modules and optimizers once, by name, and can
put other tensors in their places for the time of a trace. Numbers that change between calls stay
numbers: hyperparameters (`lr`, `betas`) and the counters that optimizers keep as 0-dim CPU tensors
(`step`) are `Number`s, which the host computes in double precision as eager PyTorch does.

Does not know: tracing, JAX, devices.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from headrace.bridge.step import scaler as scaling
from headrace.errors import CaptureError

Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One tensor of the user's that the step reads or writes: `key` says which, `name` is for
    people.
    """

    key: Key
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Number:
    """One number the step reads: a hyperparameter, or counters of equal value.

    `group` and `name` place a hyperparameter in its param group (`index` inside a tuple); `tensors`
    are the 0-dim CPU tensors of a counter, `params` the names of the parameters they belong to,
    `optimizer` whose they are.
    """

    name: str
    group: dict[str, Any] | None = None
    index: int | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    params: tuple[str, ...] = ()
    optimizer: int = -1

    def read(self) -> float:
        """Its present value on the host."""
        if self.group is None:
            return float(self.tensors[0])
        value = self.group[self.name]
        return float(value if self.index is None else value[self.index])


@dataclass(frozen=True, kw_only=True, eq=False)
class Inventory:
    """Everything the step owns. `places` are `(container, key, slot index)` of module tensors."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    scalers: tuple[GradScaler, ...]
    slots: tuple[Slot, ...]
    places: tuple[tuple[dict[str, Any], str, int], ...]
    num_params: int
    numbers: tuple[Number, ...]
    static: tuple[Any, ...] = field(default=())

    @property
    def params(self) -> tuple[Slot, ...]:
        """Slots of parameters; they come first."""
        return self.slots[: self.num_params]

    @property
    def counters(self) -> tuple[Number, ...]:
        """The numbers that optimizers keep as tensors."""
        return tuple(n for n in self.numbers if n.tensors)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor whose value the step has between calls."""
        yield from (s.tensor for s in self.slots)
        yield from (t for n in self.numbers for t in n.tensors)

    def layout(self) -> Any:
        """What a program depends on: all but the values, hashable."""
        return (
            tuple(s.key for s in self.slots),
            tuple(s.tensor.requires_grad for s in self.params),
            tuple((n.name, n.index, n.params) for n in self.numbers),
        )


def take_inventory(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    scalers: Sequence[GradScaler] = (),
    *,
    splits: Mapping[int, int] | None = None,
) -> Inventory:
    """List what the modules and optimizers hold now.

    Args:
        models: prefix of names -> module; parameters that two models share are listed once.
        splits: id of a counter tensor -> a number that keeps it apart from counters of equal value.

    Raises CaptureError for tensors that XLA cannot hold: on the meta device, sparse, quantised.
    """
    params, places = _module_tensors(models, "_parameters", optimizers)
    buffers, buffer_places = _module_tensors(models, "_buffers", ())
    offset = len(params)
    slots = params + buffers
    places = places + [(c, k, i + offset) for c, k, i in buffer_places]
    states, numbers = _optimizer_state(optimizers, params, splits or {})
    slots += states
    for i, scaler in enumerate(s for s in scalers if s.is_enabled()):
        for key in scaling.STATE:
            places.append((vars(scaler), key, len(slots)))
            name, tensor = f"GradScaler.{key}", getattr(scaler, key)
            slots.append(Slot(key=("scaler", i, key), name=name, tensor=tensor))
    _check(slots)
    return Inventory(
        modules=tuple(m for model in models.values() for m in model.modules()),
        optimizers=tuple(optimizers),
        scalers=tuple(scalers),
        slots=tuple(slots),
        places=tuple(places),
        num_params=offset,
        numbers=(*_hyperparameters(optimizers), *numbers),
    )


def _module_tensors(
    models: Mapping[str, nn.Module], attribute: str, optimizers: Sequence[Optimizer]
) -> tuple[list[Slot], list[tuple[dict[str, Any], str, int]]]:
    kind = "param" if attribute == "_parameters" else "buffer"
    index: dict[int, int] = {}
    slots: list[Slot] = []
    places: list[tuple[dict[str, Any], str, int]] = []
    for prefix, model in models.items():
        for path, module in model.named_modules():
            container: dict[str, Any] = getattr(module, attribute)
            for key, tensor in container.items():
                if tensor is None:
                    continue
                name = ".".join(x for x in (prefix, path, key) if x)
                if id(tensor) not in index:
                    index[id(tensor)] = len(slots)
                    slots.append(Slot(key=(kind, name), name=name, tensor=tensor))
                places.append((container, key, index[id(tensor)]))
    for o, optimizer in enumerate(optimizers):
        lone = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in index]
        for i, tensor in enumerate(lone):  # parameters that belong to no module
            name = f"optimizer{o}.params[{i}]"
            index[id(tensor)] = len(slots)
            slots.append(Slot(key=(kind, name), name=name, tensor=tensor))
    return slots, places


def _optimizer_state(
    optimizers: Sequence[Optimizer], params: Sequence[Slot], splits: Mapping[int, int]
) -> tuple[list[Slot], list[Number]]:
    slots: list[Slot] = []
    counters: dict[Any, list[tuple[torch.Tensor, str]]] = {}
    for o, optimizer in enumerate(optimizers):
        for slot in params:
            for key, value in optimizer.state.get(slot.tensor, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                if is_counter(value) and (slot.tensor.ndim or key in _COUNTERS):
                    same = (o, key, float(value), splits.get(id(value)))
                    counters.setdefault(same, []).append((value, slot.name))
                    continue
                name = f"{type(optimizer).__name__}.{key} of {slot.name}"
                slots.append(Slot(key=("state", o, slot.name, key), name=name, tensor=value))
    numbers = [
        Number(
            name=f"{type(optimizers[o]).__name__}.{key}",
            tensors=tuple(t for t, _ in found),
            params=tuple(name for _, name in found),
            optimizer=o,
        )
        for (o, key, *_), found in counters.items()
    ]
    return slots, numbers


# Beside a parameter without dims, a moment looks like a counter.
_COUNTERS = ("step", "mu_product")


def is_counter(value: torch.Tensor) -> bool:
    """Whether a tensor of an optimizer's state is a number that torch keeps on the host."""
    return value.ndim == 0 and value.device.type == "cpu" and value.dtype.is_floating_point


def _hyperparameters(optimizers: Sequence[Optimizer]) -> Iterator[Number]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if name == "params":
                    continue
                if _is_real(value):
                    yield Number(name=name, group=group)
                elif isinstance(value, (tuple, list)):
                    for i, part in enumerate(value):
                        if _is_real(part):
                            yield Number(name=name, group=group, index=i)


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def static_settings(optimizers: Sequence[Optimizer]) -> tuple[Any, ...]:
    """Settings of the optimizers that are part of the program: flags, integers, names."""
    return tuple(
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and (value is None or isinstance(value, (bool, int, str)))
    )


def prime(optimizers: Sequence[Optimizer]) -> list[tuple[int, torch.Tensor]]:
    """Make the optimizers' state now, as their first step would, where that step is no special one.

    Returns `(optimizer index, parameter)` for the state that was made.

    torch's optimizers make state lazily in `_init_group`, from zeros. With it made beforehand the
    first step is the same program as every other. An optimizer without that method, or whose first
    step differs (SGD with dampening), gets a program of its own for the first step.
    """
    made: list[tuple[int, torch.Tensor]] = []
    for o, optimizer in enumerate(optimizers):
        if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            continue
        had = {id(p) for p, values in optimizer.state.items() if values}
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD):
                _prime_momentum(optimizer, group)
            else:
                _prime_group(optimizer, group)
        made += [(o, p) for p, v in optimizer.state.items() if v and id(p) not in had]
    return made


def _prime_momentum(optimizer: Optimizer, group: dict[str, Any]) -> None:
    if group["momentum"] == 0 or group["dampening"] != 0:
        return
    for p in group["params"]:
        # momentum * 0 + gradient is the gradient, which is what the first step puts there
        if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _prime_group(optimizer: Any, group: dict[str, Any]) -> None:
    init = getattr(optimizer, "_init_group", None)
    fresh = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    if init is None or not fresh:
        return
    had = {p: p.grad for p in group["params"]}
    lists = [[] for _ in range(len(inspect.signature(init).parameters) - 1)]
    try:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p in set(fresh) else None
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            init({**group, "params": fresh, "fused": False}, *lists)
    finally:
        for p, gradient in had.items():
            p.grad = gradient


def forget(optimizers: Sequence[Optimizer], made: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Drop primed state of parameters that got no gradient: eager PyTorch makes none for them."""
    for o, p in made:
        optimizers[o].state.pop(p, None)


def _check(slots: Sequence[Slot]) -> None:
    problems: list[str] = []
    for slot in slots:
        t = slot.tensor
        if t.is_meta:
            problems.append(f"  {slot.name} is on the meta device: load its weights first")
        elif t.layout != torch.strided:
            problems.append(f"  {slot.name} is {t.layout}: call .to_dense() on it")
        elif t.is_quantized:
            problems.append(f"  {slot.name} is quantised: call .dequantize() on it")
        elif nn.parameter.is_lazy(t):
            problems.append(f"  {slot.name} has no shape yet: call the model once")
        elif t.device.type != "cpu":
            problems.append(
                f"  {slot.name} is on {t.device}: call .cpu() on its module; "
                "JAX moves it to the accelerator"
            )
    if problems:
        raise CaptureError(
            f"compile_step needs dense tensors with values on the CPU; {len(problems)} are not:\n"
            + "\n".join(problems[:20])
        )


@contextlib.contextmanager
def installed(
    inventory: Inventory,
    twins: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    grads: Mapping[int, torch.Tensor],
) -> Generator[None]:
    """Put `twins` in the places of the slots' tensors, `numbers` in those of the hyperparameters.

    Inside, modules and optimizers hold the twins; afterwards they are as before, whatever happened.
    """
    containers = {id(c): c for c, _, _ in inventory.places}
    before = [(c, dict(c)) for c in containers.values()]
    optimizers = [(o, o.state, [dict(g) for g in o.param_groups]) for o in inventory.optimizers]
    by_id = {id(s.tensor): t for s, t in zip(inventory.slots, twins, strict=True)}
    try:
        for container, key, i in inventory.places:
            container[key] = twins[i]
        for i, gradient in grads.items():
            twins[i].grad = gradient
        for optimizer, state, _ in optimizers:
            _install_optimizer(optimizer, state, by_id)
        for number, value in zip(inventory.numbers, numbers, strict=True):
            _install_number(number, value)
        yield
    finally:
        for container, items in before:
            container.clear()
            container.update(items)
        for optimizer, state, groups in optimizers:
            optimizer.state = state
            for group, items in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(items)


def _install_optimizer(
    optimizer: Any, state: Mapping[Any, Any], by_id: Mapping[int, torch.Tensor]
) -> None:
    twin_state: defaultdict[Any, Any] = defaultdict(dict)
    for p, values in state.items():
        if isinstance(values, dict):
            twin_state[by_id.get(id(p), p)] = {k: by_id.get(id(v), v) for k, v in values.items()}
        else:
            twin_state[p] = values
    optimizer.state = twin_state
    for group in optimizer.param_groups:
        group["params"] = [by_id[id(p)] for p in group["params"]]
        # The fused and foreach forms compute the same; one operator a tensor is what XLA fuses.
        for flag in ("foreach", "fused"):
            if flag in group:
                group[flag] = False


def _install_number(number: Number, value: Any) -> None:
    if number.group is None:
        return
    if number.index is None:
        number.group[number.name] = value
        return
    parts = list(number.group[number.name])
    parts[number.index] = value
    number.group[number.name] = type(number.group[number.name])(parts)
