"""A candidate compiled by the real TPU compiler: its memory by cause and its replayed time.

Knows: lowered steps, XLA's memory account, the replay. Does not know: prices, rows of a dataset.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from headrace.errors import PlanError
from headrace.plan.candidate import Candidate
from headrace.plan.hlo import HBM, Instruction, Module, parse_module
from headrace.plan.loops import trip_count
from headrace.plan.program import CapturedModel, LoweredStep, lower_step
from headrace.plan.replay import Assumptions, Timeline, replay
from headrace.plan.topology import into_compilation_cache, without_compilation_cache
from headrace.train.compiler_flags import FLAG_SETS
from headrace.train.memory import local_bytes, refused_bytes
from headrace.train.saved_programs import note_saved

Say = Callable[[str], None]


def compile_candidate(
    captured: CapturedModel,
    candidate: Candidate,
    *,
    supervised_share: float = 1.0,
    known: Callable[[str], dict[str, Any] | None] = lambda program: None,
    say: Say = lambda text: None,
    keep_text: str | None = None,
    save_programs: str | None = None,
) -> dict[str, Any]:
    """Lower, compile and replay: a JSON-able report (see docs/planning.md for its fields).

    known: an earlier report for a program's hash. keep_text: folder for the compiled program's
    text. save_programs: folder for entries of JAX's compilation cache; nothing known is taken then.
    A program that does not fit HBM is a report with
    `fits` false; any other refusal of the compiler raises PlanError.
    """
    say(f"lowering {candidate.slice_name} ({candidate.mesh_text()})")
    step = lower_step(captured, candidate)
    program = program_hash(step.lowered, candidate)
    found = known(program) if save_programs is None else None
    if found is not None:
        return found
    arguments = {name: local_bytes(tree) for name, tree in step.arguments.items()}
    options = dict(FLAG_SETS[candidate.flags])
    say(f"compiling for {candidate.slice_name}, flags {candidate.flags}")
    start = time.perf_counter()
    report: dict[str, Any] = {
        "program": program,
        "hbm_bytes_available": candidate.hardware.chip.hbm_bytes,
        "num_params": captured.num_params,
        "num_trainable": captured.num_trainable,
        "notes": list(captured.notes),
    }
    try:
        with _cache(save_programs) as written:
            compiled = step.lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        return report | refused(error, "step", arguments, time.perf_counter() - start)
    report["compile_seconds"] = time.perf_counter() - start
    if save_programs is not None:
        where, files = Path(save_programs), list(written or ())
        note_saved(where, slice_name=candidate.slice_name, program=program, files=files)
        report["saved_programs"] = files
    say("replaying the schedule")
    text = compiled.as_text()
    if keep_text:
        keep_program(text, Path(keep_text), program)
    module = parse_module(text)
    timeline = replay(
        module,
        candidate.hardware,
        assumptions=Assumptions(causal=captured.config.task == "causal"),
        dynamic_trips=loss_turns(step, supervised_share),
    )
    memory = memory_by_cause(compiled.memory_analysis(), arguments, module)
    total = sum(memory.values())
    return (
        report
        | {
            "fits": total <= candidate.hardware.chip.hbm_bytes,
            "memory": memory,
            "hbm_bytes_per_chip": total,
            "host_bytes": int(compiled.memory_analysis().host_temp_size_in_bytes),
        }
        | timeline_json(timeline)
    )


def _cache(folder: str | None) -> AbstractContextManager[list[str] | None]:
    return without_compilation_cache() if folder is None else into_compilation_cache(Path(folder))


def keep_program(text: str, folder: Path, name: str) -> None:
    """Write a compiled program's text as `name`.hlo."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hlo").write_text(text, encoding="utf-8")


def program_hash(lowered: Any, candidate: Candidate) -> str:
    """Names a program, its slice and flags, and the compiler."""
    from importlib.metadata import version

    digest = hashlib.sha256(lowered.as_text().encode())
    parts = (candidate.hardware.topology_name, sorted(FLAG_SETS[candidate.flags].items()))
    digest.update(repr((*parts, version("jax"), version("libtpu"))).encode())
    return digest.hexdigest()[:24]


def memory_by_cause(stats: Any, arguments: Mapping[str, int], module: Module) -> dict[str, int]:
    """Bytes of HBM on one device. The sum is XLA's own total; kept activations and logits are
    read from the program, the rest of its temporaries stays one number."""
    temporary = int(stats.temp_size_in_bytes)
    kept = min(temporary, kept_activation_bytes(module))
    logits = min(temporary - kept, logits_bytes(module))
    known = sum(arguments.values())
    total_arguments = int(stats.argument_size_in_bytes)
    results = int(stats.output_size_in_bytes) - int(stats.alias_size_in_bytes)
    return {
        **arguments,
        "padding of arguments": max(0, total_arguments - known),
        "results": max(0, results),
        "activations kept": kept,
        "logits of a chunk": logits,
        "temporaries": temporary - kept - logits,
        "program": int(stats.generated_code_size_in_bytes),
    }


def kept_activation_bytes(module: Module) -> int:
    """Stacks that a layer loop fills for the backward pass: one entry a turn, born in the step."""
    best = 0
    for computation in module.computations.values():
        for loop in computation.instructions:
            if loop.op != "while":
                continue
            turns = trip_count(module, loop) or 0
            begun = computation.by_name.get(loop.operands[0])
            if turns < 2 or begun is None or begun.op != "tuple":
                continue
            total = 0
            for name in begun.operands:
                source = computation.by_name.get(name)
                if source is None or not _is_fresh(computation.by_name, source):
                    continue
                total += sum(
                    shape.num_bytes
                    for shape in source.shapes
                    if len(shape.sizes) >= 3 and shape.sizes[0] == turns and shape.space == HBM
                )
            best = max(best, total)
    return best


def _is_fresh(by_name: Mapping[str, Instruction], source: Instruction) -> bool:
    """Whether a value starts empty in the step: a broadcast constant or an allocated buffer."""
    for _ in range(4):
        if source.op in ("copy", "bitcast", "copy-done") and source.operands:
            following = by_name.get(source.operands[0])
            if following is None:
                return False
            source = following
            continue
        break
    allocated = source.op == "custom-call" and "AllocateBuffer" in source.attributes
    return allocated or source.op == "broadcast"


def logits_bytes(module: Module) -> int:
    """The largest float32 array of the loss head: the logits of one chunk on one device."""
    largest = 0
    for _, each in _loss_head(module):
        sizes = [s.num_bytes for s in each.shapes if s.dtype == "f32" and len(s.sizes) >= 2]
        largest = max(largest, *sizes, 0)
    return largest


def _loss_head(module: Module) -> list[tuple[str, Instruction]]:
    fused = {
        each.called
        for c in module.computations.values()
        for each in c.instructions
        if each.op == "fusion"
    }
    return [
        (computation.name, each)
        for computation in module.computations.values()
        if computation.name not in fused
        for each in computation.instructions
        if "linear_cross_entropy" in " ".join(module.frames.get(each.frame, ()))
        and each.op not in ("parameter", "tuple", "get-tuple-element", "while")
    ]


def loss_turns(step: LoweredStep, share: float) -> Callable[[Module, Instruction], int | None]:
    """Turns of the loss loop, whose bound is the number of supervised tokens on a device.

    share: supervised tokens over all positions.
    """

    def turns(module: Module, loop: Instruction) -> int | None:
        frames = " ".join(module.frames.get(loop.frame, ()))
        if "linear_cross_entropy" not in frames or not step.loss_chunk:
            return None
        return max(1, math.ceil(step.loss_tokens * share / step.loss_chunk))

    return turns


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "seconds": timeline.seconds,
        "best_seconds": timeline.best_seconds,
        "worst_seconds": timeline.worst_seconds,
        "device_flops": timeline.flops,
        "busy": dict(timeline.busy),
        "link_bytes": dict(timeline.link_bytes),
        "parts": {
            name: {
                "seconds": part.seconds,
                "flops": part.flops,
                "hbm_bytes": part.hbm_bytes,
                "count": part.count,
                "bound": part.bound,
            }
            for name, part in sorted(timeline.parts.items(), key=lambda kv: -kv[1].seconds)
        },
        "assumed": list(timeline.notes),
    }


def refused(
    error: Exception, what: str, arguments: Mapping[str, int], seconds: float
) -> dict[str, Any]:
    """Fields of the report of a program that does not fit HBM, from the compiler's refusal.

    arguments: bytes by cause. Raises PlanError for a refusal that has another reason.
    """
    needed = refused_bytes(str(error))
    if needed is None:
        raise PlanError(f"the TPU compiler refused the {what}: {str(error)[:600]}") from error
    memory = {**arguments, "temporaries": max(0, needed)}
    return {
        "fits": False,
        "memory": memory,
        "hbm_bytes_per_chip": sum(memory.values()),
        "compile_seconds": seconds,
        "refusal": first_line(str(error)),
    }


def first_line(message: str) -> str:
    """Of a compiler's message, 300 characters at most."""
    return message.strip().split("\n")[0][:300]
