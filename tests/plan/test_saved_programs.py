"""Programs that a plan compiles for a run on the slice: are they the run's, are they kept?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from headrace.cli.app import run
from headrace.config import TrainConfig
from headrace.plan.candidate import Candidate
from headrace.plan.compiled import compile_candidate
from headrace.plan.program import capture_model
from headrace.plan.topology import compiler_obstacle
from headrace.train.saved_programs import SAVED, saved_obstacles

needs_compiler = pytest.mark.skipif(
    compiler_obstacle() is not None, reason=str(compiler_obstacle())
)
BASE = Path(__file__).parents[2] / "examples" / "reminders" / "base"
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ".*q_proj", "lora_dropout": 0.1}

# A run on two pretended devices is stopped at its first compilation; the plan of the same settings
# must have lowered the same text. Only the platform is changed, so that the run's can be had here.
SAME = """
import contextlib, json, sys
import jax
import headrace as hr
from headrace.config import TrainConfig
from headrace.plan import program
from headrace.plan.candidate import Candidate
from headrace.train import shapes

base, out, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
texts = []

class Stopped(Exception):
    pass

def prepare(self, *args):
    texts.append(jax.jit(self.function, donate_argnums=self.donate).lower(*args).as_text())
    raise Stopped

shapes.CompiledFunction.prepare = prepare
rows = [{"prompt": "a b c", "completion": " d e"}] * 32
arguments = hr.SFTConfig(output_dir=out, **settings)
trainer = hr.SFTTrainer(model=base, args=arguments, train_dataset=rows)
with contextlib.suppress(Stopped):
    trainer.train()
program.topology_devices = lambda hardware: jax.devices()
program.target_platform = lambda platform: contextlib.nullcontext()
captured = program.capture_model(TrainConfig(model_name_or_path=base, **settings), whole=True)
planned = Candidate(slice_name="v5e-4", mesh=settings["mesh"], batch_size=2, length=64)
texts.append(program.lower_step(captured, planned).lowered.as_text())
print(json.dumps({"same": texts[0] == texts[1], "characters": len(texts[0])}))
"""


def test_the_plan_lowers_the_program_of_the_run(tmp_path):
    settings = {
        **LORA, "mesh": {"fsdp": 2}, "per_device_train_batch_size": 2, "max_length": 64,
        "packing": True, "activation_checkpointing": "full", "dtype": "float32", "max_steps": 2,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", SAME, str(BASE), str(tmp_path)]
    done = subprocess.run(
        [*command, json.dumps(settings)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().split("\n")[-1])
    assert found["same"]
    assert found["characters"] > 50_000


@needs_compiler
def test_entries_of_the_cache_are_kept(tmp_path):
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=64,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    config = TrainConfig(model_name_or_path=str(tmp_path / "model"), dtype="bfloat16", **LORA)
    candidate = Candidate(slice_name="v5e-4", mesh={"fsdp": 4}, length=128)
    names: list[str] = []
    for number in range(2):  # captured anew: the same program has the same name
        folder = tmp_path / f"saved{number}"
        report = compile_candidate(
            capture_model(config, whole=True),
            candidate,
            known=lambda program: pytest.fail("a saved program is compiled, not remembered"),
            save_programs=str(folder),
        )
        (name,) = report["saved_programs"]
        assert (folder / name).stat().st_size > 10_000
        names.append(name)
    assert names[0] == names[1]
    listed = json.loads((folder / SAVED).read_text(encoding="utf-8"))
    assert [(each["slice"], each["files"]) for each in listed] == [("v5e-4", [names[0]])]
    assert {path.name for path in folder.iterdir()} == {names[0], SAVED}
    assert saved_obstacles(folder) == []
    listed[0]["versions"]["libtpu"] = "0.0.1"
    (folder / SAVED).write_text(json.dumps(listed), encoding="utf-8")
    (line,) = saved_obstacles(folder)
    assert "v5e-4 was compiled with libtpu 0.0.1 (here " in line


def test_what_cannot_be_saved(tmp_path, capsys):
    recipe = ["plan", "--model_name_or_path", str(BASE), "--save-programs", str(tmp_path)]
    recipe += ["--plan", "{dataset_rows: 100, dataset_mean_tokens: 50}"]
    assert run([*recipe, "--slice", "v5e-1", "--no-compile", "--all-flags"]) == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    for words in ("--no-compile was given", "--all-flags compiles several", "one device"):
        assert words in text
    assert run([*recipe, "--slice", "v5e-4,v6e-4"]) == 2
    assert saved_obstacles(tmp_path) == []
