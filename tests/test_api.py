"""The one door: what `import headrace as hr` offers, frozen, and that it stays quick."""

from __future__ import annotations

import subprocess
import sys

import headrace as hr


def test_public_names() -> None:
    assert hr.__all__ == [
        "CheckReport",
        "ClassificationConfig",
        "ClassificationTrainer",
        "CompiledStep",
        "DPOConfig",
        "DPOTrainer",
        "Engine",
        "EngineOptions",
        "JaxModule",
        "RewardConfig",
        "RewardTrainer",
        "SFTConfig",
        "SFTTrainer",
        "SamplingParams",
        "TrainConfig",
        "Trainer",
        "__version__",
        "check",
        "compile",
        "compile_step",
        "to_jax",
    ]
    for name in hr.__all__:
        assert getattr(hr, name) is not None


def test_import_loads_no_framework() -> None:
    code = "import sys, headrace; print([m for m in ('torch', 'jax', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bridge_and_kernels_know_no_other_room() -> None:
    code = (
        "import sys, headrace.bridge, headrace.kernels;"
        "rooms = ('train', 'data', 'config', 'evaluate', 'weights', 'serve', 'cli');"
        "print([m for m in sys.modules if m.split('.')[:1] == ['headrace']"
        " and m.split('.')[1:2] and m.split('.')[1] in rooms])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
