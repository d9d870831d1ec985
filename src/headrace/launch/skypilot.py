"""A SkyPilot task: machine, recipe, bucket, set-up and the run.

`sky jobs launch` replaces machines that are lost; the run goes on from its last checkpoint. For
gated models `sky jobs launch --secret HF_TOKEN` hands over the variable of this machine.
"""

from __future__ import annotations

import shlex
from typing import Any

from headrace.launch.machines import GPU_NAMES, TPU_NAMES, accelerator_type
from headrace.launch.request import LaunchRequest, yaml_text

OUTPUT = "/headrace-output"


def task(request: LaunchRequest) -> dict[str, Any]:
    """The task as SkyPilot reads it."""
    recipe = f"~/headrace/{request.recipe_name}"
    install = " ".join(shlex.quote(each) for each in request.install)
    found: dict[str, Any] = {
        "name": request.name,
        "resources": _resources(request),
        "file_mounts": {recipe: f"./{request.recipe_name}"},
        "setup": f"python3 -m pip install --upgrade {install}\n",
    }
    output = f"/tmp/{request.name}"
    if request.bucket is not None:
        mount = {"source": f"gs://{request.bucket}", "mode": "MOUNT"}
        found["file_mounts"][OUTPUT] = mount
        output = f"{OUTPUT}/{request.name}"
    lines = ["export HEADRACE_PROCESSES=auto"] if request.hosts > 1 else []
    lines += [f"cd ~/headrace && {request.train(request.recipe_name, output)}"]
    return found | {"run": "\n".join(lines) + "\n"}


def _resources(request: LaunchRequest) -> dict[str, Any]:
    wanted = request.slice
    found: dict[str, Any] = {"use_spot": request.spot}
    if wanted.is_tpu:
        found["infra"] = "gcp" if request.zone is None else f"gcp/*/{request.zone}"
        found["accelerators"] = f"tpu-{accelerator_type(wanted)}"
        found["accelerator_args"] = {"runtime_version": TPU_NAMES[wanted.chip.name].runtime}
    else:
        found["accelerators"] = f"{GPU_NAMES[wanted.chip.name]}:{wanted.num_chips}"
        if request.zone is not None:
            found["infra"] = f"*/*/{request.zone}"
    return found


def files(request: LaunchRequest) -> tuple[dict[str, str], list[str]]:
    """task.yaml and the recipe, and what starts them."""
    texts = {"task.yaml": yaml_text(task(request)), request.recipe_name: request.recipe}
    return texts, ["sky", "jobs", "launch", "--yes", "task.yaml"]
