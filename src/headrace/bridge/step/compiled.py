"""`compile_step`: the callable that chooses a program, keeps state on the device, writes it back.

Between calls the user's tensors are out of date; they are brought up to date (`sync`) when somebody
looks: at a tensor itself (`guard`), by `state_dict()` of a module or optimizer, a forward of the
model outside the step, an eager `optimizer.step()`, another compiled step on the same parameters.
The next call takes everything to the device again, so whatever was changed meanwhile counts. While
nobody looks, a call touches none of the user's tensors.

Does not know: how a step is traced or lowered.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.optim import Optimizer

from headrace.bridge.dtypes import narrowed, tensor_to_jax, tensor_to_numpy
from headrace.bridge.step import ownership
from headrace.bridge.step import scaler as scaling
from headrace.bridge.step.guard import guard, unguard
from headrace.bridge.step.packs import DeviceState
from headrace.bridge.step.program import StepProgram, build
from headrace.bridge.step.result import LazyTensor
from headrace.bridge.step.state import (
    Inventory,
    Key,
    forget,
    prime,
    static_settings,
    take_inventory,
)
from headrace.bridge.step.trace import Traced, trace_step
from headrace.bridge.step.watch import Surroundings
from headrace.errors import CaptureError

log = logging.getLogger(__name__)

Mode = Literal["one_program", "two_programs"]
_INPUTS = (torch.Tensor, int, float, bool, str, type(None))
_TRAINING = operator.itemgetter("training")


def compile_step(
    train_step: Callable[..., Any],
    *,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    mode: Mode = "one_program",
) -> CompiledStep:
    """An ordinary PyTorch training step as one compiled XLA program.

    Args:
        train_step: what runs for each batch: `zero_grad`, model, loss, `backward()`, gradient
            clipping, `optimizer.step()`, in any order and number. Its arguments are tensors (any
            shape; each new shape or dtype compiles once), Python floats (inputs of the program) and
            other Python values (part of the program). It may return anything made of tensors.
        model: the modules whose parameters and buffers the step uses; one, several, or by name.
            Modules that the function closes over (a loss with weights) are found by themselves.
        optimizer: the optimizers the step calls.
        mode: "one_program" for everything in one XLA program; "two_programs" cuts it where each
            `optimizer.step()` begins and ends, which lowers the peak of memory while compiling.

    Learning rates, momenta, step counts and Python floats are inputs: changing them compiles
    nothing. Loss scalers (`torch.amp.GradScaler`) that the function names are found by themselves;
    with one, each call waits for the result of the call before. Random numbers
    follow `torch.manual_seed` at the time of the call.

    Raises:
        TypeError: `model`, `optimizer` or `mode` are not what is named above.
        CaptureError: at the first call, for what cannot be compiled, with the line that does it.

    Example:
        >>> import torch, headrace as hr
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = hr.compile_step(train_step, model=model, optimizer=optimizer)
        >>> x, y = torch.ones(4, 3), torch.zeros(4, 1)
        >>> first, second = step(x, y), step(x, y)
        >>> bool(second < first)
        True
    """
    if mode not in ("one_program", "two_programs"):
        raise TypeError(f"mode={mode!r} is not known; use 'one_program' or 'two_programs'")
    if not callable(train_step) or isinstance(train_step, nn.Module):
        raise TypeError(
            f"train_step is a {type(train_step).__name__}; give the function that runs one "
            "training step"
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    wrong = [type(o).__name__ for o in optimizers if not isinstance(o, Optimizer)]  # pyright: ignore
    if wrong:
        raise TypeError(f"optimizer has {', '.join(wrong)}; give torch.optim optimizers")
    return CompiledStep(train_step, _named_models(model), optimizers, mode)


def _named_models(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleDict | nn.ModuleList):
        return {"": model}
    named: dict[str, Any]
    if isinstance(model, (Mapping, nn.ModuleDict)):
        named = dict(model.items())  # pyright: ignore
    else:
        named = {str(i): m for i, m in enumerate(model)}
    wrong = [f"{k}: {type(m).__name__}" for k, m in named.items() if not isinstance(m, nn.Module)]
    if wrong:
        raise TypeError(f"model has {', '.join(wrong)}; give nn.Modules")
    return dict(zip(("",), named.values(), strict=True)) if len(named) == 1 else named


class CompiledStep:
    """A training step that runs as compiled XLA programs; call it as the function itself.

    Results are tensors whose values arrive when they are looked at (`LazyTensor`). `sync()` brings
    modules and optimizers up to date; `state_dict()` does so by itself. `programs` counts what was
    compiled.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        mode: Mode,
    ) -> None:
        self._function = train_step
        self._surroundings = Surroundings(train_step)
        found = self._surroundings.modules(models.values())
        self._models = {**models, **found}
        self._scalers = self._surroundings.scalers()
        scaling.start(self._scalers)
        self._optimizers = list(optimizers)
        self._mode: Mode = mode
        self._programs: dict[Any, list[_Compiled]] = {}
        self._inventory: Inventory | None = None
        self._state = DeviceState()
        self._live: tuple[_Compiled, list[Any], list[Any]] | None = None
        self._grads: tuple[str, ...] = ()
        self._counters: list[float] = []
        self._skips: tuple[list[float], dict[int, Any]] | None = None
        self._layouts: dict[Any, int] = {}
        self._layout = 0  # which of them the user's tensors have
        self._splits: dict[int, int] = {}
        self._versions: list[int] = []
        self._fresh: list[tuple[int, torch.Tensor]] = []
        self._dirty = False  # the device is ahead, and the torch tensors are guarded
        self._busy = False
        self.owned = False
        self._refuse_unowned()
        ownership.watch(self, list(self._models.values()), self._optimizers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Returns what the function returns, without waiting for the device.

        Raises:
            TypeError: an argument is no tensor, number, string, None or a container of them.
            CaptureError: at a first call, see `compile_step`.
        """
        leaves, spec = _flatten(args, kwargs)
        inventory = self._acquire()
        key = self._key(leaves, spec)
        floats = [leaf for leaf in leaves if type(leaf) is float]
        values = self._numbers(inventory) + floats
        compiled = self._find(key, values)
        if compiled is None:
            compiled = self._compile(key, args, kwargs, values, leaves)
            inventory = self._acquire()
            values = self._numbers(inventory) + floats
        return self._run(compiled, leaves, values)

    @property
    def programs(self) -> int:
        """How many programs were made so far."""
        return sum(len(found) for found in self._programs.values())

    def sync(self) -> None:
        """Copy parameters, buffers, gradients and optimizer state from the device to the modules
        and optimizers. Waits for the device; does nothing when they are up to date.
        """
        if not self._dirty or self._inventory is None or self._busy:
            return
        self._flush()
        self._settle()
        self._unguard()
        lost = self._written_by_views()
        if lost:
            warnings.warn(
                f"{', '.join(lost[:5])} changed in place, by a view made "
                "earlier, while the present value was on the device; that change is lost. Call "
                "step.sync() before changing them so.",
                stacklevel=2,
            )
        with torch.no_grad():
            tensors = {s.key: s.tensor for s in self._inventory.slots}
            for param in self._inventory.params:
                param.tensor.grad = None
            for key, value in self._state.items():
                if key[0] == "grad":
                    param = tensors["param", key[1]]
                    param.grad = value.to(param.dtype)
                elif key in tensors:
                    tensors[key].detach().copy_(value)
            for number, value in zip(self._inventory.counters, self._counters, strict=True):
                for tensor in number.tensors:
                    tensor.fill_(value)

    def _guard(self) -> None:
        """Let everybody who looks at a tensor of the step's call `sync` first."""
        assert self._inventory is not None
        self._versions = [s.tensor._version for s in self._inventory.slots]
        guard(self._inventory.tensors(), self)
        self._dirty = True

    def _unguard(self) -> None:
        assert self._inventory is not None
        unguard(self._inventory.tensors())
        self._dirty = False
        self.owned = False  # whatever is done to the tensors now counts: the next call reads them

    def _written_by_views(self) -> list[str]:
        assert self._inventory is not None
        slots = zip(self._inventory.slots, self._versions, strict=True)
        return [s.name for s, version in slots if s.tensor._version != version]

    # ------------------------------------------------------------------ choosing a program

    def _key(self, leaves: Sequence[Any], spec: Any) -> Any:
        assert self._inventory is not None
        return (
            spec,
            tuple([_signature(leaf) for leaf in leaves]),
            self._layout,
            static_settings(self._optimizers),
            scaling.settings(self._scalers),
            self._surroundings.values(),
        )

    def _find(self, key: Any, values: Sequence[float]) -> _Compiled | None:
        for compiled in self._programs.get(key, ()):
            fits = not compiled.carries_grads or compiled.entry_grads == self._grads
            if fits and compiled.in_mode() and all(compiled.program.guards(*values)):
                return compiled
        return None

    def _numbers(self, inventory: Inventory) -> list[float]:
        self._settle()
        counters = iter(self._counters)
        return [n.read() if not n.tensors else next(counters) for n in inventory.numbers]

    def _compile(
        self, key: Any, args: Any, kwargs: Any, values: Sequence[float], leaves: Sequence[Any]
    ) -> _Compiled:
        if not self._programs:
            self._fresh = prime(self._optimizers)
            self._reset()
        else:
            self.sync()
        log.info("tracing %s", getattr(self._function, "__qualname__", "the step"))
        assert self._inventory is not None
        trainable = [i for i, s in enumerate(self._inventory.params) if s.tensor.requires_grad]
        # A step that reads none of these gradients is the same whichever of them exist.
        compiled = self._trace(args, kwargs, trainable)
        if compiled.program.reads_grads:
            present = [i for i in trainable if self._inventory.slots[i].name in set(self._grads)]
            compiled = self._trace(args, kwargs, present)
            compiled.carries_grads = True
        key = self._key(leaves, key[0])  # priming may have changed what there is
        self._programs.setdefault(key, []).append(compiled)
        return compiled

    def _trace(self, args: Any, kwargs: Any, entry_grads: Sequence[int]) -> _Compiled:
        while True:
            inventory = self._inventory
            assert inventory is not None
            before = self._surroundings.snapshot(inventory.modules)
            self._busy = True
            try:
                traced = trace_step(self._function, args, kwargs, inventory, entry_grads)
            finally:
                self._busy = False
            self._surroundings.refuse_changes(before, inventory.modules)
            exits, split = _counter_exits(inventory, traced)
            if split:
                self._splits.update(split)
                self._reset()
                continue
            program = build(traced, inventory, exits, pieces=self._mode == "two_programs")
            idle = [(o, p) for o, p in self._fresh if _untouched(inventory, program, o, p)]
            if not (idle and traced.boundaries):
                break
            self._fresh = []
            forget(self._optimizers, idle)
            self._reset()
        self._fresh = [] if traced.boundaries else self._fresh
        _refuse_new_state(inventory, traced)
        names = tuple(inventory.slots[i].name for i in entry_grads)
        exit_names = tuple(inventory.slots[i].name for i in traced.exit_grads)
        return _Compiled(program, names, exit_names, bool(traced.new_state), traced.modes)

    # ------------------------------------------------------------------ state

    def _acquire(self) -> Inventory:
        """The inventory, with what the user changed since the last call taken in."""
        if not ownership.owns(self):
            ownership.take(self)
            self._reset()
        assert self._inventory is not None
        return self._inventory

    def _reset(self) -> None:
        """Forget the device's arrays and look at the user's tensors anew."""
        self.sync()
        self._inventory = take_inventory(
            self._models, self._optimizers, self._scalers, splits=self._splits
        )
        self._live, self._state = None, DeviceState()
        self._layout = self._layouts.setdefault(self._inventory.layout(), len(self._layouts))
        self._counters = [n.read() for n in self._inventory.counters]
        self._grads = tuple(s.name for s in self._inventory.params if s.tensor.grad is not None)

    def owned_tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers of the step's modules, and the state of its loss scalers."""
        models = [t for m in self._models.values() for t in (*m.parameters(), *m.buffers())]
        return models + [vars(s)[k] for s in self._scalers if s.is_enabled() for k in scaling.STATE]

    def drop_grads(self, params: Sequence[torch.Tensor], *, to_none: bool) -> bool:
        """What `zero_grad` means for the gradients on the device; False when none are there."""
        if self._busy or not self._dirty or self._inventory is None:
            return False
        self._flush()
        ids = {id(p) for p in params}
        names = {s.name for s in self._inventory.params if id(s.tensor) in ids}
        keys = [("grad", name) for name in names]
        if to_none:
            self._state.drop(keys)
            self._grads = tuple(n for n in self._grads if n not in names)
        else:
            self._state.fill_zeros(keys)
        return True

    def _flush(self) -> None:
        """Take in what the last call wrote."""
        if self._live is None:
            return
        compiled, written, _ = self._live
        for pack, array in zip(compiled.program.written, written, strict=True):
            self._state.put(pack, array)
        left = set(self._grads)
        self._state.drop([k for k in self._state if k[0] == "grad" and k[1] not in left])
        self._live = None

    def _gather(self, compiled: _Compiled) -> tuple[list[Any], list[Any]]:
        program = compiled.program
        if self._live is not None and self._live[0] is compiled:
            return self._live[1][: program.num_donated], self._live[2]
        self._flush()
        assert self._inventory is not None
        slots = {s.key: s.tensor for s in self._inventory.slots}

        def load(key: Key) -> torch.Tensor:
            tensor = slots["param", key[1]].grad if key[0] == "grad" else slots[key]
            assert tensor is not None
            return tensor

        arrays = [self._state.get(pack, load) for pack in program.read]
        return arrays[: program.num_donated], arrays[program.num_donated :]

    # ------------------------------------------------------------------ running

    def _run(self, compiled: _Compiled, leaves: Sequence[Any], values: Sequence[float]) -> Any:
        program = compiled.program
        donated, kept = self._gather(compiled)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs = [_to_device(t, d) for t, d in zip(given, program.input_dtypes, strict=True)]
        inputs += [tensor_to_jax(t) for t in program.externals]
        numbers = program.numbers(*values)
        # the draw is from torch's generator, so that torch.manual_seed decides
        seed = np.uint32(int(torch.randint(0, 2**31 - 1, ()))) if program.draws else np.uint32(0)
        outputs = program.run(donated, [*kept, *inputs], numbers, seed)
        count = len(program.written)
        self._live = (compiled, outputs[:count], kept)
        if not self._dirty:
            self._guard()
        self._grads = compiled.exit_grads
        before, self._counters = self._counters, list(program.counters(*values))
        if compiled.skips:
            self._skips = (before, {o: outputs[i] for o, i in compiled.skips.items()})
        result = _results(program, outputs[count:], values)
        if compiled.makes_state:
            self._adopt_new_state(program)
        return result

    def _adopt_new_state(self, program: StepProgram) -> None:
        """Optimizer state that this step made becomes the optimizer's own."""
        self._flush()
        assert self._inventory is not None
        known = {s.key for s in self._inventory.slots}
        by_name = {s.name: s.tensor for s in self._inventory.params}
        dtypes = program.written_dtypes
        new = [k for k in dtypes if k[0] == "state" and k not in known]
        for key, value in self._state.items(new):
            _, o, name, entry = key
            self._optimizers[o].state[by_name[name]][entry] = value.to(dtypes[key])
        self._reset()

    def _settle(self) -> None:
        """Counters of optimizers whose last step was skipped do not count it; waits for that."""
        if self._skips is None:
            return
        assert self._inventory is not None
        before, flags = self._skips
        taken = {o: not np.asarray(flag).item() for o, flag in flags.items()}
        counts = zip(self._inventory.counters, before, self._counters, strict=True)
        self._counters = [new if taken.get(n.optimizer, True) else old for n, old, new in counts]
        self._skips = None

    def _refuse_unowned(self) -> None:
        if not self._models and not self._optimizers:
            raise TypeError("compile_step needs at least one model or optimizer")


class _Compiled:
    """A program, the gradients that must exist when it begins and those that do when it ends."""

    def __init__(
        self,
        program: StepProgram,
        entry_grads: tuple[str, ...],
        exit_grads: tuple[str, ...],
        makes_state: bool,
        modes: Sequence[tuple[nn.Module, bool]],
    ) -> None:
        self.program = program
        self.entry_grads = entry_grads
        self.exit_grads = exit_grads
        self.makes_state = makes_state
        self.carries_grads = False  # whether it depends on which gradients exist
        self._attributes = [vars(module) for module, _ in modes]
        self._training = [training for _, training in modes]
        written = enumerate(program.written)
        self.skips = {p.keys[0][1]: i for i, p in written if p.keys[0][0] == "skipped"}

    def in_mode(self) -> bool:
        """Whether the modules are in the mode (train or eval) they had in the trace."""
        return list(map(_TRAINING, self._attributes)) == self._training


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    if not kwargs and all(isinstance(a, torch.Tensor) for a in args):
        return list(args), len(args)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not all(isinstance(leaf, _INPUTS) for leaf in leaves):
        problems = [
            f"  {pytree.keystr(path)} is a {type(leaf).__name__}"
            for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]
            if not isinstance(leaf, _INPUTS)
        ]
        raise TypeError(
            "the step was called with values that cannot be inputs of a program:\n"
            + "\n".join(problems)
            + "\nNeeded: torch tensors, numbers, strings, None, or dicts, lists and tuples of them."
        )
    return leaves, spec


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_meta:
            kind = leaf.layout if leaf.layout != torch.strided else "meta"
            raise TypeError(
                f"the step was called with a {kind} tensor of shape {list(leaf.shape)}; dense "
                "tensors with values are needed (.to_dense())"
            )
        return leaf.dtype, leaf.shape
    return float if type(leaf) is float else (type(leaf), leaf)


def _to_device(tensor: torch.Tensor, dtype: np.dtype) -> Any:
    if isinstance(tensor, LazyTensor):
        return tensor.array
    values = tensor_to_numpy(tensor)
    # a copy: the user may write into the tensor while the device still reads
    return np.array(values) if values.dtype == dtype else narrowed(values, dtype)


def _results(program: StepProgram, arrays: Sequence[Any], values: Sequence[float]) -> Any:
    host = program.host_results(*values)
    leaves: list[Any] = []
    for kind, what, *tensor in program.results:
        if kind == "fixed":
            leaves.append(what)
        elif kind == "number":
            leaves.append(host[what])
        elif tensor[0] is None:  # the step said .item(): its caller wants a Python number
            leaves.append(np.asarray(arrays[what]).item())
        else:
            leaves.append(LazyTensor(arrays[what], *tensor))
    return pytree.tree_unflatten(leaves, program.out_spec)


def _counter_exits(inventory: Inventory, traced: Traced) -> tuple[list[Any], dict[int, int]]:
    """Counters after the step, and a mark for each counter that must be told from its equals."""
    exits: list[Any] = []
    split: dict[int, int] = {}
    for number in inventory.numbers:
        if not number.tensors:
            continue
        found: dict[Any, list[int]] = {}
        for tensor in number.tensors:
            value = traced.counters[id(tensor)]
            expression = value.node.expr if hasattr(value, "node") else float(value)
            found.setdefault(expression, []).append(id(tensor))
        exits.append(next(iter(found)))
        if len(found) > 1:
            split |= {i: k for k, ids in enumerate(found.values()) for i in ids}
    return exits, split


def _refuse_new_state(inventory: Inventory, traced: Traced) -> None:
    makers = {o for o, _, _ in traced.new_state} & set(traced.skipped)
    if makers:
        names = ", ".join(type(inventory.optimizers[o]).__name__ for o in makers)
        raise CaptureError(
            f"{names} makes its state in its first step, which a GradScaler may skip.\n"
            "Needed: state that exists before. Run one step by eager PyTorch first."
        )


def _untouched(inventory: Inventory, program: StepProgram, o: int, p: torch.Tensor) -> bool:
    name = next((s.name for s in inventory.params if s.tensor is p), None)
    return not any(k[0] == "state" and k[1] == o and k[2] == name for k in program.written_dtypes)


__all__ = ["CompiledStep", "compile_step"]
