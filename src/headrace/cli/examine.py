"""What can be done with a model nobody here has seen: one finding for each question.

capture -> layers -> numbers -> lora -> sharding -> packing -> serving. The structure is looked at
without weights; numbers are compared on the model's own weights, or on random ones where there are
only configuration files.

Knows: which part of Headrace answers which question. Does not know: words, printing.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections import Counter
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import CaptureError, ConfigError, HeadraceError

if TYPE_CHECKING:
    from torch import nn

    from headrace.bridge.module import JaxModule

Verdict = Literal["yes", "partly", "no", "skipped"]
LARGEST_COMPARED = 300_000_000  # parameters; beyond that a comparison takes minutes and memory
_SAME_IN_DOUBLE = 1e-6  # a hundredth of what gradients may differ in float32
_BATCH, _LENGTH = 2, 16
_TASKS = {
    "ForSequenceClassification": "sequence-classification",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForImageClassification": "AutoModelForImageClassification",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one question: a verdict, lines for people, and the same as data."""

    subject: str
    verdict: Verdict
    lines: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that is examined: its structure, and a way to get it with weights."""

    name: str
    structure: Any
    inputs: dict[str, Any]
    with_weights: Any
    weights: str


def from_factory(path: str) -> Subject:
    """`module:function` that returns a module, or a module and its example inputs."""
    module_name, _, function_name = path.partition(":")
    if not function_name:
        raise ConfigError(f"{path!r} is no factory; give module:function")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} cannot be imported: {error}") from error
    try:
        made = factory()
    except Exception as error:  # the user's own code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{path!r} raised {type(error).__name__}: {error}\n"
            f"  {frame.filename}:{frame.lineno}: {frame.line}\n"
            "Give a function without arguments that returns a module, or (module, example_inputs)."
        ) from error
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if inputs is None:
        inputs = example_inputs(model)
    return Subject(
        name=path, structure=model, inputs=inputs, with_weights=lambda: model, weights="its own"
    )


def from_name(
    name: str, *, task: str | None, weights: str, dtype: str, trust_remote_code: bool
) -> Subject:
    """A folder or hub id; nothing but the configuration is read here."""
    from transformers import AutoConfig

    from headrace.weights import meta_model

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is no model: {str(error).splitlines()[0]}\n"
            "Give a folder with config.json, a hub id, or a Python factory with --factory."
        ) from error
    task = task or task_of(config)
    options: dict[str, Any] = {"task": task, "trust_remote_code": trust_remote_code}
    structure = meta_model(config, dtype=dtype, **options)
    have_files = not Path(name).is_dir() or any(Path(name).glob("*.safetensors*"))
    own = weights == "own" or (weights == "auto" and have_files)

    def load() -> Any:
        from headrace.weights.meta import auto_class

        kind: Any = auto_class(task)
        if own:
            return kind.from_pretrained(name, dtype=_float32(), trust_remote_code=trust_remote_code)
        return kind.from_config(config, dtype=_float32(), trust_remote_code=trust_remote_code)

    return Subject(
        name=name,
        structure=structure,
        inputs=example_inputs(structure),
        with_weights=load,
        weights="its own" if own else "random",
    )


def _float32() -> Any:
    import torch

    return torch.float32


def task_of(config: Any) -> str:
    """The task that a configuration's `architectures` name; causal when they name none."""
    for architecture in getattr(config, "architectures", None) or ():
        for ending, task in _TASKS.items():
            if architecture.endswith(ending):
                return task
    return "AutoModelForSeq2SeqLM" if getattr(config, "is_encoder_decoder", False) else "causal"


def example_inputs(model: Any) -> dict[str, Any]:
    """Inputs that fit a transformers model, by its own main input name."""
    import torch

    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(
            f"{type(model).__name__} is no transformers model, so its inputs are unknown; let the "
            "factory return (model, example_inputs)"
        )
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(_BATCH, channels, height, width)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(3, max(int(text.vocab_size) - 1, 4), (_BATCH, _LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        if isinstance(end := getattr(config, "eos_token_id", None), int):
            ids[ids == end], ids[:, -1] = 3, end  # classifiers of this kind read the last token
        inputs["decoder_input_ids"] = ids.clone()
    return inputs


def examine(subject: Subject, *, mesh: str, compare: bool = True) -> list[Finding]:
    """All findings, in order; a model that does not capture gets those that need no capture."""
    from headrace.bridge.module import to_jax

    model = subject.structure.train()
    try:
        module: JaxModule | None = to_jax(model, subject.inputs)
    except CaptureError as error:
        found = [_refused(error)]
        module = None
    else:
        found = [_captured(module), _layers(module)]
    if module is not None:
        found.append(_numbers(subject) if compare else _skipped("numbers", "not asked for"))
    found.append(_lora(model))
    if module is not None:
        found.append(_sharding(module, mesh))
        found.append(_packing(subject, module, compare))
        found.append(_serving(subject, compare))
    return found


def _skipped(subject: str, reason: str) -> Finding:
    return Finding(subject=subject, verdict="skipped", lines=(reason,))


def _refused(error: CaptureError) -> Finding:
    lines = str(error).splitlines()
    return Finding(subject="capture", verdict="no", lines=tuple(lines), data={"error": str(error)})


def _captured(module: JaxModule) -> Finding:
    program = module.program
    nodes = program.nodes()
    notes = [n for r in program.history for n in r.notes if r.name != "roll"]
    shapes = "batch and sequence free" if program.dynamic else "one capture a shape"
    return Finding(
        subject="capture",
        verdict="yes",
        lines=(
            f"{len(nodes)} operators, every one with a rule; {shapes}",
            *(n for n in notes if "run-time assertions" not in n),  # of no consequence to anybody
        ),
        data={"operators": len(nodes), "dynamic": program.dynamic, "notes": notes},
    )


def _layers(module: JaxModule) -> Finding:
    rolls = [n for r in module.program.history if r.name == "roll" for n in r.notes]
    loops = [n.target.length for n in module.program.loops]  # pyright: ignore
    unrolled = [n for n in rolls if "not rolled" in n]
    some = any(length > 1 for length in loops)
    verdict: Verdict = "yes" if some and not unrolled else "partly" if some else "no"
    lines = tuple(rolls) or ("no repeated layers: the program grows with depth",)
    return Finding(
        subject="layers run as loops",
        verdict=verdict,
        lines=lines,
        data={"loops": loops, "notes": rolls},
    )


def _numbers(subject: Subject) -> Finding:
    from headrace.bridge import check

    size = sum(p.numel() for p in subject.structure.parameters())
    if size > LARGEST_COMPARED:
        return _skipped(
            "numbers",
            f"{size / 1e6:,.0f} million parameters: too many to compare here; use a smaller "
            "configuration of the same architecture",
        )
    model = subject.with_weights().train()
    try:
        report = check(model, subject.inputs, operators=False)
    except HeadraceError:
        raise
    except Exception as error:  # the model's own code, on inputs made from its configuration
        return _skipped(
            "numbers",
            f"PyTorch itself fails on the example inputs ({type(error).__name__}: {error}); a "
            "factory can return (model, example_inputs) that fit",
        )
    rounding = None if report.ok else _in_double(model, subject.inputs)
    if not report.ok and rounding is None:
        report = check(model.float(), subject.inputs, operators=True)
    first = str(report.disagreements[0]) if report.disagreements else None
    worst = max(report.gradients, key=lambda n: report.gradients[n], default=None)
    lines = [
        f"{_counted(report.outputs, 'output')}, largest relative error {report.worst_output:.1e}",
        f"{_counted(report.gradients, 'gradient')}, largest relative error "
        f"{report.worst_gradient:.1e}" + (f" ({worst})" if worst else ""),
        f"on {subject.weights} weights, float32, dropout off",
    ]
    if rounding is not None:
        lines.append(f"in float64 they agree to {rounding:.1e}: float32 rounds a result near 0")
    elif first:
        lines.append(f"first operator that differs: {first}")
    return Finding(
        subject="numbers",
        verdict="yes" if report.ok or rounding is not None else "no",
        lines=tuple(lines),
        data={
            "output_error": report.worst_output,
            "gradient_error": report.worst_gradient,
            "first_difference": first,
            "float64_error": rounding,
            "weights": subject.weights,
        },
    )


def _counted(values: Sized, noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _in_double(model: nn.Module, inputs: Any) -> float | None:
    """The largest difference in float64, None where the two differ there too."""
    import jax
    import torch
    from torch.utils._pytree import tree_map

    from headrace.bridge import check

    def widened(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floats else value

    wide = tree_map(widened, inputs)
    with jax.enable_x64(True):
        report = check(model.double(), wide, operators=False, dynamic=False)
    worst = max(report.worst_output, report.worst_gradient)
    return worst if worst <= _SAME_IN_DOUBLE else None


def _lora(model: nn.Module) -> Finding:
    import torch

    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    counts: dict[str, Counter[str]] = {}
    for name, module in model.named_modules():
        conv1d = type(module).__name__ == "Conv1D"
        if (isinstance(module, torch.nn.Linear) or conv1d) and module is not output:
            layer = re.search(r"\.(\d+)\.", name)
            index = int(layer.group(1)) if layer else -1
            kind = kinds[index] if layer and index < len(kinds) else "layer" if layer else "once"
            counts.setdefault(name.rsplit(".", 1)[-1], Counter())[kind] += 1
    targets = [
        f"{name} {sum(found.values())}"
        + (f" ({', '.join(f'{n} {kind}' for kind, n in found.items())})" if len(found) > 1 else "")
        for name, found in sorted(counts.items())
    ]
    return Finding(
        subject="LoRA targets",
        verdict="yes" if counts else "no",
        lines=(", ".join(targets) or "no linear layers",),
        data={name: dict(found) for name, found in counts.items()},
    )


def _sharding(module: JaxModule, mesh: str) -> Finding:
    from headrace.sharding import MeshConfig, plan_params

    sizes = MeshConfig.sized(mesh)
    try:
        plans = plan_params(module, sizes)
    except HeadraceError as error:
        return Finding(subject=f"sharding over {mesh}", verdict="no", lines=(str(error),))
    whole = [p for p in plans.values() if p.bytes == p.bytes_per_device]
    reasons = Counter(p.reason or "no reason noted" for p in whole)
    total, each = (
        sum(p.bytes for p in plans.values()),
        sum(p.bytes_per_device for p in plans.values()),
    )
    sources = Counter(p.source for p in plans.values())
    lines = [
        f"{_size(total)} of parameters, {_size(each)} a device",
        "placed by: " + "; ".join(f"{source} {n}" for source, n in sources.most_common()),
    ]
    if reasons:
        why = "; ".join(f"{reason} {n}" for reason, n in reasons.most_common(5))
        lines.append(f"whole on every device: {why}")
    divided = sum(p.bytes for p in whole) <= total / 10
    return Finding(
        subject=f"sharding over {mesh}",
        verdict="yes" if divided else "partly",
        lines=tuple(lines),
        data={"bytes": total, "bytes_per_device": each, "sources": dict(sources),
              "specs": {k: str(p.spec) for k, p in plans.items()}},
    )  # fmt: skip


def _packing(subject: Subject, module: JaxModule, compare: bool) -> Finding:
    """Two examples in one row against each alone: the answer that cannot be wrong."""
    import torch

    names = set(subject.inputs)
    if "input_ids" not in names or "decoder_input_ids" in names:
        return _skipped("packing", "packing is for models that read one sequence of tokens")
    attention = [n for n in module.program.nodes() if "headrace.attention" in str(n.target)]
    if not attention:
        return Finding(
            subject="packing", verdict="no",
            lines=("no attention operator reads segments: tokens of one example would reach the "
                   "next. Train with packing: false",),
        )  # fmt: skip
    size = sum(p.numel() for p in subject.structure.parameters())
    if not compare or size > LARGEST_COMPARED:
        return _skipped("packing", "needs numbers")
    model = subject.with_weights().eval()
    ids = subject.inputs["input_ids"][:1]
    positions = torch.arange(ids.shape[1])[None]
    takes_positions = "position_ids" in _forward_names(model)
    inputs = {"input_ids": ids} | ({"position_ids": positions} if takes_positions else {})
    error = _packed_error(model, inputs, ids)
    safe = error <= 1e-4
    line = f"two examples in one row differ from each alone by {error:.1e} relative"
    advice = () if safe else ("Train with packing: false",)
    return Finding(
        subject="packing",
        verdict="yes" if safe else "no",
        lines=(line, *advice),
        data={"error": error, "position_ids": takes_positions},
    )


def _forward_names(model: nn.Module) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def _packed_error(model: nn.Module, inputs: dict[str, Any], ids: Any) -> float:
    import numpy as np

    from headrace.bridge.module import to_jax

    module = to_jax(model, inputs)
    params, buffers = module.params(), module.buffers()

    def run(tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
        given = {"input_ids": tokens, "position_ids": positions}
        given = {k: v for k, v in given.items() if k in inputs}
        outputs, _ = module.apply(params, buffers, segment_ids=segments, train=False, **given)  # pyright: ignore
        return np.asarray(outputs.logits)

    tokens, half = ids.numpy(), ids.shape[1] // 2
    restarting = np.concatenate([np.arange(half), np.arange(ids.shape[1] - half)])[None]
    segments = np.where(np.arange(ids.shape[1]) < half, 1, 2)[None]
    packed = run(tokens, restarting, segments)
    if packed.ndim < 3:
        return float("inf")  # one answer a row: two examples cannot share it
    parts = [tokens[:, :half], tokens[:, half:]]
    alone = [run(t, np.arange(t.shape[1])[None], np.ones_like(t)) for t in parts]
    expected = np.concatenate(alone, axis=1)
    return float(np.abs(packed - expected).max() / max(np.abs(expected).max(), 1e-6))


def _serving(subject: Subject, compare: bool) -> Finding:
    """What `capture_for_serving` would refuse, and what a token takes in the cache."""
    from headrace.serve.cache import cache_entries
    from headrace.serve.model import capture_decoder, vocabulary_size
    from headrace.serve.tokenwise import require_tokenwise

    if "input_ids" not in subject.inputs or "decoder_input_ids" in subject.inputs:
        return _skipped("serving", "serving is for decoder-only models of tokens")
    output = getattr(subject.structure, "get_output_embeddings", lambda: None)()
    if output is None:
        return _skipped("serving", "the model has no LM head")
    size = sum(p.numel() for p in subject.structure.parameters())
    tried = compare and size <= LARGEST_COMPARED
    model = (subject.with_weights() if tried else subject.structure).eval()
    try:
        module = capture_decoder(model, roll=False)
        if tried:
            require_tokenwise(
                module,
                module.params(),
                module.buffers(),
                vocab_size=vocabulary_size(model),
                name=type(model).__name__,
            )
        entries = cache_entries(module.program)
    except CaptureError as error:
        return Finding(subject="serving", verdict="no", lines=tuple(str(error).splitlines()))
    token = sum(
        e.layers * e.num_kv_heads * (e.key_size + e.value_size) * e.dtype.itemsize
        for e in entries.values()
        if e.writes
    )
    layers = sum(e.layers for e in entries.values())
    lines = [f"{layers} layers with a paged key/value cache, {token:,} bytes a token"]
    if not tried:
        lines.append("whether tokens meet outside of attention was not tried: it needs numbers")
    return Finding(
        subject="serving",
        verdict="yes" if tried else "partly",
        lines=tuple(lines),
        data={"layers": layers, "cache_bytes_per_token": token},
    )
