"""A script for Cloud TPU without another tool: queued resource, set-up, run, and again when lost.

The script ends with the run's own exit code when the machine is still there, and asks for another
machine when it is not. It deletes the queued resource at its end.
"""

from __future__ import annotations

import shlex

from headrace.launch.machines import TPU_NAMES, accelerator_type
from headrace.launch.request import LaunchRequest

_SCRIPT = r"""#!/usr/bin/env bash
# {title}
# Needs: gcloud with a project, and quota. Costs money until it has ended.
set -euo pipefail
cd "$(dirname "$0")"

NAME={name}
ZONE={zone}
RECIPE={recipe_name}

queued() {{ gcloud compute tpus queued-resources "$@" --zone "$ZONE" --quiet; }}
machine() {{ gcloud compute tpus tpu-vm "$@" --zone "$ZONE" --quiet --worker=all; }}
everywhere() {{ machine ssh "$NAME" --command "$1"; }}
state() {{ queued describe "$NAME" --format 'value(state.state)' 2>/dev/null || echo GONE; }}
release() {{ queued delete "$NAME" --force || true; }}
trap release EXIT

for attempt in $(seq 1 {attempts}); do
  echo "attempt $attempt of {attempts}"
  queued create "$NAME" --node-id "$NAME" --accelerator-type {accelerator} \
    --runtime-version {runtime}{spot}
  until [ "$(state)" = ACTIVE ]; do
    case "$(state)" in FAILED|SUSPENDED|GONE) break ;; esac
    sleep 30
  done
  status=75
  if [ "$(state)" = ACTIVE ] &&
     machine scp "$RECIPE" "$NAME:$RECIPE" &&
     everywhere {setup}; then
    status=0
    everywhere {run} || status=$?
  fi
  [ "$status" -eq 0 ] && exit 0
  # A machine that is still there ran the program to its end: its error is the answer.
  [ "$status" -ne 75 ] && [ "$(state)" = ACTIVE ] && exit "$status"
  release
done
echo "given up after {attempts} attempts" >&2
exit 75
"""

_MOUNT = (
    "echo 'deb [signed-by=/usr/share/keyrings/cloud.google.asc] "
    "https://packages.cloud.google.com/apt gcsfuse-'\"$(lsb_release -c -s)\"' main' "
    "| sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null && "
    "curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg "
    "| sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null && "
    "sudo apt-get -qq update && sudo apt-get -qq install -y gcsfuse && "
    "mkdir -p ~/headrace-output && gcsfuse {bucket} ~/headrace-output"
)


def script(request: LaunchRequest) -> str:
    """The whole script."""
    quote = shlex.quote
    install = " ".join(quote(each) for each in request.install)
    setup = f"python3 -m pip install --upgrade {install}"
    output = f"/tmp/{request.name}"
    if request.bucket is not None:
        setup += " && " + _MOUNT.format(bucket=quote(request.bucket))
        output = f"headrace-output/{request.name}"
    run = f"PATH=$HOME/.local/bin:$PATH {request.train(request.recipe_name, output)}"
    if request.hosts > 1:
        run = f"HEADRACE_PROCESSES=auto {run}"
    return _SCRIPT.format(
        title=f"{request.recipe_name} on {request.slice.name}, by headrace launch",
        name=quote(request.name),
        zone=quote(request.zone or ""),
        recipe_name=quote(request.recipe_name),
        accelerator=quote(accelerator_type(request.slice)),
        runtime=quote(TPU_NAMES[request.slice.chip.name].runtime),
        spot=" --spot" if request.spot else "",
        attempts=request.restarts + 1,
        setup=quote(setup),
        run=quote(run),
    )


def files(request: LaunchRequest) -> tuple[dict[str, str], list[str]]:
    """launch.sh and the recipe, and what starts them."""
    return {"launch.sh": script(request), request.recipe_name: request.recipe}, [
        "bash",
        "launch.sh",
    ]
