"""How far plans are from measured runs.

Every row is a published run whose configuration is public: rows a device, length, mesh, what is
recomputed, precision (bf16), and the file it stands in. The analytic model answers for all of them
at once, about the program as it was published (`Form`): which results are kept for the backward
pass, and how the attention kernel cuts its blocks. `--compile` also compiles Headrace's own step
for the rows that one slice can hold (3 to 15 minutes each on 2 idle cores, cached) and replays it:
that is Headrace's program against theirs. The paper's row is compiled as the paper ran it: tensor
parallel, dense attention, dense loss, padded rows.

    python benchmarks/plan_accuracy.py                      # analytic, all rows, a second
    python benchmarks/plan_accuracy.py --compile --rows paper,llama-8b-v6e-8
    python benchmarks/plan_accuracy.py --memory             # analytic against compiled

Sources (read 2026-11-21): TPU_RECIPES/training, MAXTEXT, arXiv:2605.25645 for the paper. MaxText's
generic models (v5e-16b and the like) are published as TFLOP/s by MaxText's own rule, which counts
all pairs of an attention; `maxtext_rate` turns that into tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.plan.analytic import Form, estimate

MODELS = Path(__file__).resolve().parent.parent / "examples" / "planning"


TPU_RECIPES = "github.com/AI-Hypercomputer/tpu-recipes"
MAXTEXT = "github.com/AI-Hypercomputer/maxtext"
QKV = frozenset({"q_proj", "k_proj", "v_proj"})
QKVO = QKV | {"o_proj"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """measured: positions a second and chip, padding included. form: of the published program,
    None for Headrace's own under `remat`. source: file of the recipe, below training/ in
    TPU_RECIPES unless it begins with a name of its own."""

    name: str
    model: str
    slice_name: str
    mesh: dict[str, int]
    rows: int  # of each device that rows are divided over
    length: int
    measured: float
    source: str = ""
    form: Form | None = None
    accumulation: int = 1
    remat: str = "full"
    lora: int = 0
    flags: str = "overlap"
    paper: bool = False
    compiles: bool = False
    remark: str = ""


def generic(scale: int) -> dict[str, Any]:
    """MaxText's model of `global_parameter_scale`: sizes double in turn, from 1B."""
    third, rest = divmod(int(math.log2(scale)), 3)
    heads, wide = 16 * 2 ** (third + (rest > 0)), 7168 * 2 ** (third + (rest > 0))
    return LLAMA | {
        "hidden_size": 2048 * 2 ** (third + (rest > 1)),
        "intermediate_size": wide,
        "num_hidden_layers": 16 * 2**third,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32000,
    }


LLAMA: dict[str, Any] = {
    "model_type": "llama", "head_dim": 128, "dtype": "bfloat16", "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "16b": generic(16),
    "32b": generic(32),
    "64b": generic(64),
    "128b": generic(128),
    "llama-3.1-405b": LLAMA
    | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "gpt3-175b": {
        "model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_inner": 49152,
        "vocab_size": 50304, "n_positions": 2048, "head_dim": 128, "dtype": "bfloat16",
    },
}  # fmt: skip


def maxtext_rate(model: str, length: int, tflops: float) -> float:
    """Tokens a second of a chip for MaxText's TFLOP/s of a generic model."""
    config = CONFIGS[model]
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    layer = 4 * hidden * heads + 3 * hidden * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + hidden * config["vocab_size"]
    pairs = 12 * config["num_hidden_layers"] * heads * length
    return tflops * 1e12 / (6 * weights + pairs)


def generic_run(
    chip: str,
    slice_name: str,
    model: str,
    mesh: dict[str, int],
    rows: int,
    tflops: float,
    **more: Any,
) -> Published:
    """A row of MaxText/configs/{v5e,v5p}: README.md has the TFLOP/s, MODEL.sh the rest."""
    return Published(
        name=f"{model}-{slice_name}", model=model, slice_name=slice_name, mesh=mesh, rows=rows,
        length=2048, measured=maxtext_rate(model, 2048, tflops),
        source=f"{MAXTEXT}: MaxText/configs/{chip}/{{README.md,{model}.sh}}", **more,
    )  # fmt: skip


# Offloading recipes of v6e: layer inputs and projections in host memory, one backward kernel.
OFFLOAD = Form(kept=QKVO, on_host=True, block=2048, backward_products=5)
OFFLOAD_QKV = Form(kept=QKV, on_host=True, block=2048, backward_products=5)
LLAMA_8B = "trillium/Llama3.1-8B-MaxText/v6e-{}/README.md"
LLAMA_70B = "trillium/Llama3.1-70B-MaxText/v6e-{}/README.md"
IRONWOOD = "ironwood/README.md and ironwood/{}/cluster_toolkit/run_recipe.sh"

RUNS = (
    Published(
        name="paper", model="gemma-4-31b", slice_name="v5p-8", mesh={"tensor": 4}, rows=1,
        accumulation=8, length=3072, lora=64, flags="default", paper=True,
        measured=763 / 0.30 / 4, compiles=True, source="arXiv:2605.25645",
        remark="763 real tokens/s; rows of 922 tokens padded to 3,072; dense attention and loss",
    ),
    *(
        Published(
            name=f"llama-8b-v6e-{chips}", model="llama-3.1-8b", slice_name=f"v6e-{chips}",
            mesh={"fsdp": chips}, rows=rows, length=8192, measured=measured, form=OFFLOAD,
            remat="offload", flags="overlap-vmem", compiles=chips == 8,
            source=LLAMA_8B.format(chips),
        )
        for chips, rows, measured in ((8, 3, 7139), (32, 3, 7032), (256, 4, 7207))
    ),
    Published(
        name="mistral-7b-v6e-8", model="mistral-7b", slice_name="v6e-8", mesh={"fsdp": 8}, rows=6,
        length=8192, measured=7777, form=OFFLOAD, remat="offload", flags="overlap-vmem",
        compiles=True, source="trillium/Mistral-7B-MaxText/README.md",
    ),
    *(
        Published(
            name=f"llama-70b-v6e-{chips}", model="llama-3.1-70b", slice_name=f"v6e-{chips}",
            mesh={"fsdp": chips}, rows=rows, length=8192, measured=measured, form=OFFLOAD_QKV,
            remat="offload", flags="overlap-vmem", source=LLAMA_70B.format(chips),
        )
        for chips, rows, measured in ((32, 2, 921), (64, 2, 877), (128, 4, 942), (256, 5, 960))
    ),
    Published(
        name="llama2-70b-v6e-256", model="llama-2-70b", slice_name="v6e-256", mesh={"fsdp": 256},
        rows=3, length=4096, measured=905, flags="overlap-vmem", remat="offload",
        form=Form(kept=QKV, on_host=True, block=1024),
        source="trillium/Llama2-70B-MaxText/README.md",
    ),
    Published(
        name="gpt3-175b-v6e-256", model="gpt3-175b", slice_name="v6e-256", mesh={"fsdp": 256},
        rows=3, length=2048, measured=357.6, form=Form(block=1024), flags="overlap-vmem",
        source="trillium/GPT3-175B-MaxText/bf16/README.md",
    ),
    Published(
        name="gemma3-12b-v6e-256", model="gemma-3-12b", slice_name="v6e-256", mesh={"fsdp": 256},
        rows=1, length=32768, measured=4478, form=Form(block=1024), flags="default",
        source="trillium/Gemma3-12B-MaxText/v6e-256/README.md",
        remark="no flags for overlapping gathers",
    ),
    Published(
        name="llama2-70b-v5p-1024", model="llama-2-70b", slice_name="v5p-1024",
        mesh={"fsdp": 512}, rows=4, length=4096, measured=692,
        form=Form(kept=QKVO | {"down_proj"}), remat="dots",
        source=f"{MAXTEXT}: docs/reference/models/tiering.md, benchmarks/"
        "maxtext_v5p_model_configs.py (llama2_70b_v5p_128)",
    ),
    Published(
        name="llama-405b-v5p-1024", model="llama-3.1-405b", slice_name="v5p-1024",
        mesh={"fsdp": 512}, rows=2, length=8192, measured=124.6, remat="offload",
        form=Form(kept=frozenset({"down_proj"}), keeps_attention=True, on_host=True, block=2048),
        source="v5p/Llama3.1-405B-MaxText/{README.md,cluster_toolkit/run_recipe.sh}",
    ),
    generic_run("v5e", "v5e-256", "16b", {"fsdp": 256}, 6, 120),
    generic_run("v5e", "v5e-256", "32b", {"fsdp": 256}, 4, 132),
    generic_run("v5e", "v5e-256", "64b", {"fsdp": 256}, 2, 118),
    generic_run("v5p", "v5p-128", "32b", {"fsdp": 16, "tensor": 4}, 28, 328, remat="dots"),
    generic_run("v5p", "v5p-128", "64b", {"fsdp": 16, "tensor": 4}, 12, 323, remat="dots"),
    generic_run("v5p", "v5p-256", "128b", {"fsdp": 16, "tensor": 8}, 8, 315, remat="dots"),
    generic_run("v5p", "v5p-512", "128b", {"fsdp": 32, "tensor": 8}, 8, 316, remat="dots"),
    Published(
        name="gemma4-31b-v7x-128", model="gemma-4-31b", slice_name="v7x-128", mesh={"fsdp": 128},
        rows=4, length=8192, measured=5371,
        form=Form(kept=frozenset({"o_proj", "down_proj"}), block=1024, backward_products=5),
        source=IRONWOOD.format("gemma4-31b/8k-bf16-tpu7x-4x4x4"),
    ),
    *(
        Published(
            name=f"llama-70b-v7x-{2 * chips}", model="llama-3.1-70b",
            slice_name=f"v7x-{2 * chips}", mesh={"fsdp": 2 * chips}, rows=2, length=8192,
            measured=measured, remat="attention",
            form=Form(kept=QKV, keeps_attention=True, block=2048, backward_products=5),
            source=IRONWOOD.format(f"llama3.1-70b/8k-bf16-tpu7x-{shape}"),
        )
        for chips, shape, measured in ((64, "4x4x4", 2687), (256, "4x8x8", 2671))
    ),
    Published(
        name="llama-70b-128k-v7x-512", model="llama-3.1-70b", slice_name="v7x-512",
        mesh={"fsdp": 64, "context": 8}, rows=1, length=131072, measured=963, remat="attention",
        form=Form(
            kept=QKV | {"down_proj"}, keeps_attention=True, block=2048, backward_products=5
        ),
        source=IRONWOOD.format("llama3.1-70b/128k-bf16-tpu7x-4x8x8"),
    ),
    Published(
        name="llama-405b-v7x-512", model="llama-3.1-405b", slice_name="v7x-512",
        mesh={"fsdp": 512}, rows=3, length=8192, measured=499.8, remat="offload",
        form=Form(
            kept=frozenset({"k_proj", "v_proj", "down_proj"}), on_host=True, block=2048,
            backward_products=5,
        ),
        source=IRONWOOD.format("llama3.1-405b/8k-bf16-tpu7x-4x8x8"),
    ),
)  # fmt: skip
MEMORY_RUNS = (
    # model, slice, mesh, rows, length, remat, LoRA rank (0: all weights)
    ("gemma-2b", "v5e-1", {}, 2, 2048, "full", 16),
    ("gemma-2b", "v5e-1", {}, 1, 2048, "dots", 16),
    ("gemma-2b", "v5e-8", {"fsdp": 8}, 1, 4096, "full", 0),
    ("llama-3.1-8b", "v5e-8", {"fsdp": 8}, 1, 4096, "full", 16),
    ("llama-3.1-8b", "v5e-8", {"fsdp": 4, "tensor": 2}, 1, 4096, "full", 16),
    ("llama-3.1-8b", "v5p-8", {"fsdp": 4}, 2, 4096, "full", 0),
    ("llama-3.1-8b", "v6e-8", {"fsdp": 8}, 3, 8192, "full", 0),
    ("mistral-7b", "v5p-8", {"fsdp": 4}, 1, 4096, "none", 16),
    ("gemma-3-12b", "v5p-8", {"fsdp": 4}, 1, 4096, "full", 32),
    ("gemma-4-31b", "v5p-8", {"fsdp": 4}, 1, 4096, "full", 64),
)
LEFT_OUT = (
    "Llama 3.1 8B on v6e-16, 64 and 128, 4 x v6e-256 and others of several slices: the same rows "
    "a device as here, or slices joined over a data-centre network, which is not modelled",
    "GPT3 175B on v5p: its recipe trains in int8; fp8 recipes of v6e and v7x",
    "Llama 2 7B on v5p: its recipe publishes no time",
    "Llama 3.1 8B with 1M to 10M tokens on v5p and v7x: fractions of a row on a device, ring "
    "attention, a variant with other heads",
    "Gemma 4 E2B and E4B on v7x: embeddings for every layer and shared keys are not in the quick "
    "model",
    "generic 128B on v5e-256 (its script in the repository is not the one that was published), "
    "256B to 1024B on v5p: not read",
    "mixture-of-experts on v5p, v6e and v7x: routing is not in the analytic model's time",
    "TRL + FSDP on 2 x H100 (486 tokens/s): eager PyTorch, not a program that is planned here",
)


def subject(run: Published) -> Any:
    from headrace.config import TrainConfig
    from headrace.plan.planner import read_subject

    settings: dict[str, Any] = {"dtype": "bfloat16"}
    if run.lora:
        settings |= {"use_peft": True, "lora_r": run.lora}
        settings["lora_dropout"] = 0.05 if run.paper else 0.0
    with tempfile.TemporaryDirectory() as folder:
        given = CONFIGS.get(run.model)
        if given is not None:
            (Path(folder) / "config.json").write_text(json.dumps(given))
        model = folder if given is not None else str(MODELS / run.model)
        return read_subject(TrainConfig(model_name_or_path=model, **settings))


def candidate(run: Published) -> Any:
    from headrace.plan.candidate import Candidate

    return Candidate(
        slice_name=run.slice_name, mesh=run.mesh, batch_size=run.rows, length=run.length,
        accumulation=run.accumulation, packing=False, remat=run.remat, flags=run.flags,
    )  # fmt: skip


@contextlib.contextmanager
def as_the_paper_ran() -> Generator[None]:
    """Dense attention and a loss that holds all logits, in place of Headrace's kernels."""
    from headrace.plan import program

    kernels: Any = importlib.import_module("headrace.kernels.attention")  # not the function
    choose, loss = kernels._choose, program.causal_loss
    kernels._choose = lambda *given: "dense"
    program.causal_loss = lambda module, **given: loss(module, fused=False, **given)
    try:
        yield
    finally:
        kernels._choose, program.causal_loss = choose, loss


def compiled(run: Published, folder: Path) -> dict[str, Any]:
    """The report of Headrace's own step, or of the paper's form of it; kept in `folder`."""
    stored = folder / f"{run.name}.json"
    if stored.is_file():
        return json.loads(stored.read_text())
    from headrace.plan.compiled import compile_candidate
    from headrace.plan.program import capture_model

    form = as_the_paper_ran() if run.paper else contextlib.nullcontext()
    captured = capture_model(subject(run).config)
    with form:
        report = compile_candidate(
            captured,
            candidate(run),
            say=lambda text: print(f"  {run.name}: {text}", file=sys.stderr),
        )
    folder.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(report))
    return report


def memory_sweep(folder: Path) -> None:
    """Analytic against compiled memory; a minute or more each on a quiet machine, kept."""
    from headrace.plan.planner import analytic_plan

    print("| model | slice, mesh | rows | remat | LoRA | analytic GiB | compiled GiB | error |")
    print("|---|---|---|---|---|---|---|---|")
    for model, slice_name, mesh, rows, length, remat, lora in MEMORY_RUNS:
        parts = "-".join(f"{k}{v}" for k, v in mesh.items())
        run = Published(
            name=f"memory-{model}-{slice_name}-{parts}-{rows}-{length}-{remat}-{lora}",
            model=model, slice_name=slice_name, mesh=mesh, rows=rows, length=length, remat=remat,
            lora=lora, measured=0.0, flags="default",
        )  # fmt: skip
        plan = analytic_plan(subject(run), candidate(run))
        total = compiled(run, folder)["hbm_bytes_per_chip"]
        print(
            f"| {model} | {slice_name} {parts} | {rows}x{length} | {remat} | {lora or 'no'} "
            f"| {plan.hbm_bytes / 2**30:.2f} | {total / 2**30:.2f} "
            f"| {plan.hbm_bytes / total - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile rows that one slice holds")
    parser.add_argument("--rows", default="", help="names, comma separated; all without")
    parser.add_argument("--folder", default="out/plan_accuracy", help="compiled reports go here")
    parser.add_argument("--memory", action="store_true", help="memory of ten configurations")
    parser.add_argument("--parts", action="store_true", help="seconds of each kind of work")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from headrace.plan.topology import prepare_environment

    prepare_environment()
    if given.memory:
        memory_sweep(Path(given.folder))
        return
    wanted = [r for r in RUNS if not given.rows or r.name in given.rows.split(",")]
    print("| run | published tok/s/chip | analytic | error | compiled | error | source, remark |")
    print("|---|---|---|---|---|---|---|")
    errors: list[float] = []
    for run in wanted:
        each, asked = subject(run), candidate(run)
        chips = asked.hardware.num_chips
        found = estimate(each.training, asked, form=run.form)
        rate = asked.step_positions / found.seconds / chips
        error = rate / run.measured - 1
        if not run.paper:
            errors.append(error)
        cells = ["", ""]
        if run.compiles and (given.compile or (Path(given.folder) / f"{run.name}.json").is_file()):
            report = compiled(run, Path(given.folder))
            cells = ["does not fit", ""]
            if "seconds" in report:
                replayed = asked.step_positions / report["seconds"] / chips
                cells = [f"{replayed:,.0f}", f"{replayed / run.measured - 1:+.0%}"]
        print(
            f"| {run.name} | {run.measured:,.0f} | {rate:,.0f} | {error:+.0%} "
            f"| {cells[0]} | {cells[1]} | {run.source}{'; ' * bool(run.remark)}{run.remark} |"
        )
        if given.parts:
            shares = ", ".join(f"{k} {v:.2f}" for k, v in found.parts.items())
            print(f"    {found.seconds:.2f} s: {shares}")
    close = sum(abs(error) <= 0.15 for error in errors)
    print(f"\nfull training: {close} of {len(errors)} rows within 15 %")
    for line in LEFT_OUT:
        print(f"\nleft out: {line}", end="")
    print()


if __name__ == "__main__":
    main()
