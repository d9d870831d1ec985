"""Captured programs on disk, so that a second process does not trace the same model again.

A capture is the same when everything its trace could read is: the classes and their source files,
the configuration, every module's simple attributes and mode, names, shapes and dtypes of parameters
and buffers, plain tensors that modules hold, the example's structure, and the versions of torch,
transformers, peft and Headrace. Files are JSON and safetensors with a digest; a file that does not
fit is ignored and written anew.

Does not know: what a program means (`serial.py`).
"""

# Hooks of modules have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from headrace.bridge import serial
from headrace.bridge.dtypes import tensor_to_numpy
from headrace.bridge.program import Program, verify

log = logging.getLogger(__name__)

_VARIABLE = "HEADRACE_CAPTURE_CACHE"
_PACKAGES = ("torch", "transformers", "peft", "sympy")
# Attributes that the key has in another form, or that no forward reads.
_ELSEWHERE = ("_parameters", "_buffers", "_modules", "config", "training", "generation_config")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, SafetensorError)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def cache_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """Where captures lie: the argument, else $HEADRACE_CAPTURE_CACHE; "none" is nowhere."""
    chosen = os.fspath(given) if given is not None else os.environ.get(_VARIABLE)
    return None if chosen in (None, "", "none") else Path(chosen).expanduser()


def capture_key(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """A digest of everything the capture depends on; None when something has no stable form."""
    digest = hashlib.sha256()
    try:
        for part in _parts(model, args, kwargs, options):
            digest.update(repr(part).encode())
            digest.update(b"\0")
    except (_Unstable, OSError) as error:
        log.debug("capture is not kept: %s", error)
        return None
    return digest.hexdigest()


class _Unstable(ValueError):
    """An attribute whose value cannot be compared between processes."""


def _parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Any]:
    yield sorted(options.items())
    yield [(name, _version(name)) for name in _PACKAGES], _own_source()
    yield torch.get_default_dtype()
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    yield str(spec), [_described(leaf) for leaf in leaves]
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config")) is not None}
    yield [_stable(c) for c in configs.values()]
    kinds: dict[type, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kinds.setdefault(type(module))
        for base in type(module).__mro__:
            kinds.setdefault(base)
        yield name, type(module).__qualname__, module.training, list(_attributes(module))
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        yield [_stable(h) for h in hooks]
    yield [(k.__module__, k.__qualname__, _source(k)) for k in kinds]
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        yield first.setdefault(id(tensor), name)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return _stable(leaf)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if name in _ELSEWHERE:
            continue
        if name.startswith(("_forward", "_backward", "_state_dict", "_load_state_dict")):
            continue
        yield name, _stable(value)


def _stable(value: Any, depth: int = 0) -> Any:
    """A form that is equal in two processes exactly when the value is."""
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return "meta", tuple(value.shape), str(value.dtype)
        digest = hashlib.sha256(tensor_to_numpy(value).tobytes()).hexdigest()
        return tuple(value.shape), str(value.dtype), digest
    if isinstance(value, type) or inspect.isroutine(value) or inspect.ismodule(value):
        if "<" in getattr(value, "__qualname__", ""):
            raise _Unstable(f"the closure {value.__qualname__}")
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", str(value))
    if isinstance(value, nn.Module):
        return type(value).__qualname__  # its own attributes come with the tree
    if depth > 6:
        raise _Unstable(f"a {type(value).__name__} nested too deeply")
    if isinstance(value, functools.partial):
        return _stable((value.func, value.args, value.keywords), depth + 1)
    if isinstance(value, Mapping):
        pairs = [(_stable(k, depth + 1), _stable(v, depth + 1)) for k, v in value.items()]  # pyright: ignore
        return type(value).__name__, sorted(map(repr, pairs))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(_stable(v, depth + 1)) for v in value)  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_stable(v, depth + 1) for v in value]  # pyright: ignore
    if hasattr(value, "__dict__"):
        return type(value).__qualname__, _stable(vars(value), depth + 1)
    if type(value).__repr__ is object.__repr__:
        raise _Unstable(f"a {type(value).__name__}")
    return type(value).__qualname__, repr(value)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


@functools.cache
def _own_source() -> str:
    """A digest of the bridge's own code: a changed rule or pass is another capture."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _source(kind: type) -> str:
    """A digest of the file a class stands in; torch's own files go by its version."""
    if kind.__module__.split(".")[0] in ("builtins", "torch"):
        return ""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        file = None
    if file is None:
        raise _Unstable(f"{kind.__qualname__} has no source file")
    return _file_digest(file)


def read(folder: Path, key: str) -> Program | None:
    """The program kept under the key; None when there is none or its file is damaged."""
    path = folder / f"{key}.capture"
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    try:
        digest, length, rest = raw[:64].decode(), int(raw[64:80]), raw[80:]
        if hashlib.sha256(raw[64:]).hexdigest() != digest:
            raise ValueError("the digest differs")
        program = serial.load(json.loads(rest[:length]), load_tensors(rest[length:]))
        verify(program)
    except _DAMAGE as error:
        log.warning("%s is damaged (%s): capturing again", path, error)
        return None
    log.info("%s: capture read from %s", program.name, path)
    return program


def write(folder: Path, key: str, program: Program) -> None:
    """Keep the program; a full or read-only disk is no reason to stop."""
    try:
        written, constants = serial.dump(program)
        text = json.dumps(written).encode()
    except (serial.NotSerialisable, ValueError) as error:
        log.info("%s: capture is not kept: %s", program.name, error)
        return
    body = f"{len(text):16d}".encode() + text + save_tensors(constants)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + body)
        os.replace(file.name, folder / f"{key}.capture")
    except OSError as error:
        log.warning("captures cannot be kept in %s: %s", folder, error)
