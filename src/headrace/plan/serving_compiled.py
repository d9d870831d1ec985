"""An engine's programs compiled by the real TPU compiler: memory by cause, replayed times.

Of the engine's programs three are compiled: the step in which every stream gets a token, the step
that computes as many prompt tokens beside them as the engine takes, and the greedy sampler. The
engine's other steps are smaller ones of the same kinds.

Knows: lowered programs, XLA's memory account, the replay. Does not know: prices, arrivals.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from headrace.errors import ConfigError
from headrace.kernels.paged import KEYS_ELSEWHERE
from headrace.plan.candidate import ServerCandidate
from headrace.plan.compiled import first_line, keep_program, refused, timeline_json
from headrace.plan.hlo import Instruction, Module, parse_module
from headrace.plan.replay import Assumptions, PagedRead, Timeline, replay
from headrace.plan.serving_program import CapturedServer, lower_for_tpu, server_lowering
from headrace.plan.topology import without_compilation_cache
from headrace.serve.lowering import Lowering
from headrace.serve.shapes import StepShape
from headrace.train.memory import local_bytes

Say = Callable[[str], None]


def compile_server(
    captured: CapturedServer,
    candidate: ServerCandidate,
    *,
    known: Callable[[str], dict[str, Any] | None] = lambda program: None,
    say: Say = lambda text: None,
    keep_text: str | None = None,
) -> dict[str, Any]:
    """Lower, compile and replay the programs of one copy of the model: a JSON-able report.

    known: an earlier report for a program's hash. A server that does not fit HBM is a report with
    `fits` false. Raises ConfigError for what the engine refuses, PlanError for any other refusal of
    the compiler.
    """
    say(f"lowering {candidate.slice_name} (tensor {candidate.tensor})")
    try:
        lowering = server_lowering(captured, candidate)
    except ConfigError as error:
        if "the cache has" not in str(error):
            raise
        return _no_room(captured, candidate, str(error))
    keys = program_keys(lowering)
    lowered = {name: lower_for_tpu(lowering, key) for name, key in keys.items()}
    program = _hash(lowered, candidate)
    found = known(program)
    if found is not None:
        return found
    start, compiled = time.perf_counter(), dict[str, Any]()
    report = {**_sizes(lowering, captured), "program": program}
    for name, each in lowered.items():
        say(f"compiling the {name} for {candidate.slice_name}")
        try:
            with without_compilation_cache():
                compiled[name] = each.compile()
        except jax.errors.JaxRuntimeError as error:
            seconds = time.perf_counter() - start
            return report | refused(error, name, _arguments(lowering), seconds)
    report["compile_seconds"] = time.perf_counter() - start
    say("replaying the schedules")
    times: dict[str, Any] = {}
    for name, each in compiled.items():
        text = each.as_text()
        if keep_text:
            keep_program(text, Path(keep_text), f"{program}-{name.replace(' ', '-')}")
        times[name] = timeline_json(_replayed(parse_module(text), candidate, lowering))
    memory = server_memory(lowering, {n: c.memory_analysis() for n, c in compiled.items()})
    total, limit = sum(memory.values()), candidate.hardware.chip.hbm_bytes
    a_token = memory["cache pages"] / lowering.shapes.num_pages / lowering.shapes.page_size
    room = limit - (total - memory["cache pages"])
    needed = max(candidate.longest, candidate.streams * (candidate.prompt + candidate.answer))
    return report | {
        "fits": total <= limit and cache_tokens(lowering) >= needed,
        "memory": memory,
        "hbm_bytes_per_chip": total,
        "cache_bytes_per_token": a_token,
        "cache_tokens_that_fit": max(0, int(room / a_token)),
        "programs": times,
        "decode_seconds": times["decode step"]["seconds"] + times["sampler"]["seconds"],
        "prompt_step_seconds": times["prompt step"]["seconds"] + times["sampler"]["seconds"],
    }


def program_keys(lowering: Lowering) -> dict[str, Any]:
    """The programs that are compiled, by what they are called in a plan."""
    shapes = lowering.shapes
    blocks, streams = shapes.block_steps[-1], shapes.max_num_seqs
    return {
        "decode step": ("step", StepShape(decode=streams, blocks=0), False),
        "prompt step": ("step", StepShape(decode=streams, blocks=blocks), False),
        "sampler": ("sample", "greedy", streams),
    }


def _hash(lowered: dict[str, Any], candidate: ServerCandidate) -> str:
    """Names the programs, the slice, what is assumed of the traffic, and the compiler."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for each in lowered.values():
        digest.update(each.as_text().encode())
    parts = (candidate.hardware.topology_name, sorted(candidate.as_json().items(), key=str))
    digest.update(repr((*parts, version("jax"), version("libtpu"))).encode())
    return digest.hexdigest()[:24]


def _sizes(lowering: Lowering, captured: CapturedServer) -> dict[str, Any]:
    shapes = lowering.shapes
    return {
        "engine": asdict(shapes),
        "attention": sorted(set(lowering.forms.values())),
        "cache_tokens": cache_tokens(lowering),
        "prompt_tokens_a_step": shapes.block_steps[-1] * shapes.block,
        "notes": list(captured.notes),
    }


def cache_tokens(lowering: Lowering) -> int:
    """Tokens that the engine's cache holds."""
    return (lowering.shapes.num_pages - 1) * lowering.shapes.page_size


def _arguments(lowering: Lowering) -> dict[str, int]:
    model = lowering.model
    return {
        "weights": local_bytes((model.params, model.buffers)),
        "cache pages": local_bytes(lowering.pages),
        "penalties and biases": local_bytes(lowering.shaping),
    }


def server_memory(lowering: Lowering, stats: dict[str, Any]) -> dict[str, int]:
    """Bytes of HBM on one device, by cause; `stats`: XLA's account of each program.

    All weights and state are there all the time, one program runs at a time, and the code of every
    program that the engine compiles stays loaded (smaller shapes are counted like the largest).
    """
    known = _arguments(lowering)
    step = stats["decode step"]
    held = local_bytes(lowering.program(program_keys(lowering)["decode step"])[1])
    counts = {"decode step": 0, "prompt step": 0, "sampler": 0}
    for key in lowering.all_keys():
        if key[0] == "step":
            counts["prompt step" if key[1].blocks else "decode step"] += 1
        else:
            counts["sampler"] += 1
    results = [int(s.output_size_in_bytes) - int(s.alias_size_in_bytes) for s in stats.values()]
    temporary = [int(s.temp_size_in_bytes) for s in stats.values()]
    return {
        **known,
        "padding of arguments": max(0, int(step.argument_size_in_bytes) - held),
        "results": sum(max(0, size) for size in results),
        "temporaries": max(temporary),
        "programs": sum(
            int(stats[name].generated_code_size_in_bytes) * count for name, count in counts.items()
        ),
    }


def _replayed(module: Module, candidate: ServerCandidate, lowering: Lowering) -> Timeline:
    context = candidate.prompt + candidate.answer // 2
    read = PagedRead(
        decode=candidate.streams,
        context=context,
        block=lowering.shapes.block,
        prompt=max(1, candidate.prompt // 2),
    )

    page = lowering.shapes.page_size
    at_a_time = max(1, KEYS_ELSEWHERE // page) * page

    def gathered(module: Module, loop: Instruction) -> int | None:
        """Turns of the portable form's loop over keys; the longest row decides."""
        frames = " ".join(module.frames.get(loop.frame, ()))
        return -(-context // at_a_time) if "kernels/paged.py" in frames else None

    return replay(
        module,
        candidate.hardware,
        assumptions=Assumptions(paged=read, longest_branch=False),
        dynamic_trips=gathered,
    )


def _no_room(captured: CapturedServer, candidate: ServerCandidate, why: str) -> dict[str, Any]:
    """The report of a copy whose weights leave no room for one sequence: nothing to compile."""
    from headrace.plan.serving_program import abstract_model
    from headrace.plan.topology import topology_devices

    devices = topology_devices(candidate.hardware)[: candidate.tensor]
    model = abstract_model(captured, devices, quantization=candidate.quantization)
    weights = local_bytes((model.params, model.buffers))
    return {
        "program": "",
        "fits": False,
        "memory": {"weights": weights},
        "hbm_bytes_per_chip": weights,
        "cache_tokens": 0,
        "compile_seconds": 0.0,
        "refusal": first_line(why),
        "notes": list(captured.notes),
    }


__all__ = ["compile_server", "program_keys", "server_memory"]
