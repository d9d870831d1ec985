"""What engines are given fits their schemas; user strings stay data; lost machines are replaced."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headrace.cli.app import run
from headrace.errors import ConfigError
from headrace.launch import LaunchRequest, write_launch
from headrace.launch.machines import accelerator_type, chips_per_host, num_hosts
from headrace.plan.hardware import parse_slice

RECIPE = "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: yahma/alpaca-cleaned\n"
EVIL = "it's; $(touch owned) `touch owned` \"\n- x: {y}"


def _request(engine: str, slice_name: str, **more: Any) -> LaunchRequest:
    given: dict[str, Any] = {
        "engine": engine, "name": "run-1", "recipe": RECIPE, "recipe_name": "lora.yaml",
        "slice": parse_slice(slice_name), "zone": "us-east5-a", "bucket": "my-bucket",
        "image": "registry/headrace:1" if engine == "gke" else None,
    }  # fmt: skip
    return LaunchRequest(**given | more)


def _schema(name: str) -> Any:
    return json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "hosts", "chips", "accelerator"),
    [
        ("v5p-8", 1, 4, "v5p-8"),
        ("v5p-32", 4, 4, "v5p-32"),
        ("v5e-8", 1, 8, "v5litepod-8"),
        ("v5e-16", 4, 4, "v5litepod-16"),
        ("v6e-1", 1, 1, "v6e-1"),
        ("v4-16", 2, 4, "v4-16"),
    ],
)
def test_slices_by_googles_names(name: str, hosts: int, chips: int, accelerator: str) -> None:
    wanted = parse_slice(name)
    found = (num_hosts(wanted), chips_per_host(wanted), accelerator_type(wanted))
    assert found == (hosts, chips, accelerator)


@pytest.mark.parametrize("name", ["v5p-8", "v6e-16", "h100-8"])
@pytest.mark.parametrize("flags", [(), ("--learning_rate", EVIL)])
def test_skypilot_tasks_fit_the_schema(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    files, command = write_launch(_request("skypilot", name, spot=True, flags=flags), tmp_path)
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    jsonschema.validate(task, _schema("skypilot_task"))
    assert "--resume_from_checkpoint true" in task["run"]
    assert task["resources"]["use_spot"] is True and "gs://my-bucket" in str(task["file_mounts"])
    assert [path.name for path in files] == ["task.yaml", "lora.yaml"] and command[0] == "sky"
    _runs_as_words(task["run"], flags)


def _runs_as_words(command: str, flags: tuple[str, ...]) -> None:
    """A shell gives `headrace` the flags as they were; nothing else of them is run."""
    shown = "headrace() { printf '%s\\0' \"$@\"; }\ncd() { true; }\n" + command
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    assert words[0] == "train" and all(flag in words for flag in flags)
    assert not Path("owned").exists()


@pytest.mark.parametrize("flags", [(), ("--learning_rate", EVIL)])
def test_jobsets_fit_the_schema(tmp_path: Path, flags: tuple[str, ...]) -> None:
    request = _request("gke", "v6e-16", spot=True, queue="team", secret="hub", flags=flags)
    write_launch(request, tmp_path)
    recipe, jobset = yaml.safe_load_all((tmp_path / "jobset.yaml").read_text())
    jsonschema.validate(jobset, _schema("jobset"))
    assert recipe["data"] == {"lora.yaml": RECIPE}
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    _runs_as_words(pod["containers"][0]["command"][2], flags)


FAKE = r"""#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *describe*) cat "$STATE" ;;
  *queued-resources\ create*) echo ACTIVE > "$STATE" ;;
  *"headrace train"*)
    if [ "$(grep -c 'headrace train' "$CALLS")" -le "$LOST" ]; then
      echo SUSPENDED > "$STATE"; exit 255
    fi
    exit "$EXIT" ;;
esac
"""


def _run_script(folder: Path, lost: int, code: int) -> tuple[int, list[str]]:
    fake = folder / "bin" / "gcloud"
    fake.parent.mkdir()
    fake.write_text(FAKE)
    fake.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "CALLS": str(folder / "calls"),
        "STATE": str(folder / "state"), "LOST": str(lost), "EXIT": str(code),
    }  # fmt: skip
    done = subprocess.run(["bash", str(folder / "launch.sh")], env=env, timeout=60, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("lost", "code", "ends", "machines"), [(0, 0, 0, 1), (2, 0, 0, 3), (0, 2, 2, 1), (9, 0, 75, 4)]
)
def test_lost_machines_are_replaced_and_errors_are_not_repeated(
    tmp_path: Path, lost: int, code: int, ends: int, machines: int
) -> None:
    request = _request("gcloud", "v5p-32", spot=True, restarts=3, flags=("--lora_r", EVIL))
    write_launch(request, tmp_path)
    status, calls = _run_script(tmp_path, lost, code)
    created = [call for call in calls if "queued-resources create" in call]
    assert (status, len(created)) == (ends, machines)
    assert "--accelerator-type v5p-32" in created[0] and " --spot" in created[0]
    deleted = [call for call in calls if "queued-resources delete" in call]
    assert len(deleted) >= machines  # nothing is left that costs money
    train = next(call for call in calls if "headrace train" in call)
    assert "HEADRACE_PROCESSES=auto" in train and not (tmp_path / "owned").exists()


def test_all_problems_at_once_and_nothing_written(tmp_path: Path) -> None:
    bad = _request(
        "gcloud", "v7x-32", name="Bad Name", zone=None, bucket=None, recipe="x: hf_" + "a" * 30
    )
    with pytest.raises(ConfigError) as error:
        write_launch(bad, tmp_path / "out")
    text = str(error.value)
    for part in ("'Bad Name'", "--engine gke", "--zone", "--bucket", "secret"):
        assert part in text
    assert not (tmp_path / "out").exists()


def test_the_command_writes_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "lora.yaml"
    recipe.write_text(RECIPE)
    words = ["launch", str(recipe), "--engine", "skypilot", "--slice", "v5p-8"]
    assert run([*words, "--out", str(tmp_path / "out"), "--max_steps", "5"]) == 0
    assert "to start it" in capsys.readouterr().out
    task = yaml.safe_load((tmp_path / "out" / "task.yaml").read_text())
    assert "--max_steps 5" in task["run"] and "--mesh auto" in task["run"]
    assert run([*words, "--lora_rr", "3"]) == 2
