"""A `torch.autograd.Function` that the forward applies, with the backward it was written with.

torch.export keeps a Function's forward only. While a model is captured `Function.apply` is ours:
the forward is traced as it stands, then the backward is traced behind it on stand-ins for the
gradients (`headrace::cotangent`), and `headrace::own_backward` joins the two. Everything is one
graph, so that operators of the backward are decomposed, checked and rolled like all others;
`derivatives.py` takes the backward's nodes out of the forward when the program is lowered.

A backward that cannot be traced leaves its reason in the node: the program still runs forward and
its gradient is refused. Does not know: JAX.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from headrace.errors import CaptureError


@torch.library.custom_op("headrace::cotangent", mutates_args=())
def cotangent_op(like: Tensor) -> Tensor:
    """Stand-in for the gradient of `like`, equal in shape and dtype."""
    return torch.ones_like(like)


@cotangent_op.register_fake
def _(like: Tensor) -> Tensor:  # pyright: ignore[reportUnusedFunction]
    return torch.empty_like(like)


@torch.library.custom_op("headrace::own_backward", mutates_args=())
def own_backward_op(
    outputs: list[Tensor],
    inputs: list[Tensor],
    cotangents: list[Tensor],
    gradients: list[Tensor],
    refused: str,
) -> list[Tensor]:
    """`outputs` again. Their derivative is `gradients` for `inputs` and nothing for anything else.

    cotangents: a `headrace::cotangent` for each output, from which `gradients` were computed.
    refused: why there is no gradient, or "".
    """
    del inputs, cotangents, gradients, refused
    return [o.clone() for o in outputs]


@own_backward_op.register_fake
def _(  # pyright: ignore[reportUnusedFunction]
    outputs: list[Tensor],
    inputs: list[Tensor],
    cotangents: list[Tensor],
    gradients: list[Tensor],
    refused: str,
) -> list[Tensor]:
    return [torch.empty_like(o) for o in outputs]


class _Context(FunctionCtx):
    """What forward and backward see as `ctx`."""

    to_save: tuple[Any, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(_is_float(x) for x in inputs)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


@contextlib.contextmanager
def own_backwards(notes: list[str]) -> Generator[None]:
    """While this is open, functions that are applied keep their own backward in the graph."""
    original = Function.__dict__["apply"]
    inside = False

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        registered = cls.__module__ == "torch._library.autograd"  # an operator, which has a rule
        if inside or registered or not torch.is_grad_enabled():
            return original.__func__(cls, *args, **kwargs)
        if cls is CheckpointFunction:  # its derivative is that of what it runs
            return args[0](*args[2:])
        inside = True
        try:
            return _applied(cls, args, kwargs, notes)
        finally:
            inside = False

    Function.apply = classmethod(apply)  # pyright: ignore
    try:
        yield
    finally:
        Function.apply = original


def _applied(
    cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], notes: list[str]
) -> Any:
    args, ctx, results = _forward(cls, args, kwargs)
    if ctx.dirty_tensors:
        raise CaptureError(
            f"{cls.__name__} (torch.autograd.Function) writes into its inputs (mark_dirty).\n"
            "Needed: a Function that returns new tensors."
        )
    single = not isinstance(results, tuple)
    outputs: list[Any] = [results] if single else list(results)
    fixed = [id(t) for t in ctx.non_differentiable]
    places = [i for i, o in enumerate(outputs) if _is_float(o) and id(o) not in fixed]
    cotangents = [torch.ops.headrace.cotangent(outputs[i]) for i in places]
    inputs, gradients, refused = _backward(cls, ctx, args, outputs, places, cotangents)
    note = f"{cls.__name__} (torch.autograd.Function) keeps its own backward"
    if refused:
        note = f"{cls.__name__} (torch.autograd.Function) has no gradient here: {refused}"
        inputs, gradients = [x for x in args if _is_float(x)], []
    if note not in notes:
        notes.append(note)
    joined = torch.ops.headrace.own_backward(
        [outputs[i] for i in places], inputs, cotangents, gradients, refused
    )
    for i, output in enumerate(outputs):
        outputs[i] = output.detach() if isinstance(output, Tensor) else output
    for i, output in zip(places, joined, strict=True):
        outputs[i] = output
    return outputs[0] if single else tuple(outputs)


def _forward(
    cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], _Context, Any]:
    if cls.setup_context is Function.setup_context:
        ctx = _Context(args)
        return args, ctx, cls.forward(ctx, *args, **kwargs)
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    ctx, results = _Context(bound.args), cls.forward(*bound.args, **bound.kwargs)
    cls.setup_context(ctx, bound.args, results)
    return bound.args, ctx, results


def _backward(
    cls: type[Function],
    ctx: _Context,
    args: tuple[Any, ...],
    outputs: list[Any],
    places: list[int],
    cotangents: list[Tensor],
) -> tuple[list[Tensor], list[Tensor], str]:
    """The inputs that get a gradient, those gradients, and why there are none."""
    given = dict(zip(places, cotangents, strict=True))
    grads = [
        given.get(i, torch.zeros_like(o) if isinstance(o, Tensor) else None)
        for i, o in enumerate(outputs)
    ]
    try:
        with torch.no_grad(), _no_autograd():
            # Older functions name it vjp.
            backward: Callable[..., Any] = (
                cls.backward if cls.backward is not Function.backward else cls.vjp
            )
            found = backward(ctx, *grads)
            found = found if isinstance(found, tuple) else (found,)
            pairs = [
                (x, _like(g, x))
                for x, g in zip(args, found, strict=False)
                if _is_float(x) and isinstance(g, Tensor)
            ]
    except Exception as error:
        reason = str(error).strip().splitlines()
        return [], [], f"{type(error).__name__}: {reason[0] if reason else ''}"[:300]
    return [x for x, _ in pairs], [g for _, g in pairs], ""


def _like(gradient: Tensor, tensor: Tensor) -> Tensor:
    """As torch fits a gradient to its input: broadcast dims are summed, the dtype is cast."""
    if gradient.ndim != tensor.ndim or gradient.shape != tensor.shape:
        gradient = gradient.sum_to_size(tensor.shape)
    return gradient.to(tensor.dtype)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@contextlib.contextmanager
def _no_autograd() -> Generator[None]:
    """A backward that runs autograd itself writes gradients where the graph does not see them."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            "its backward runs autograd itself (to compute its forward again), and writes "
            "gradients into parameters that it does not return"
        )

    kept = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward, torch.autograd.grad = refuse, refuse
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = kept
