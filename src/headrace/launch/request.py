"""What is to be run where, checked before anything is written.

Nothing secret goes into a file: tokens come from the engine's own store, by name. Every string of
the user is quoted for the language it is put into.

Knows: the request, its problems. Does not know: an engine's format.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.launch.machines import TPU_NAMES, num_hosts
from headrace.plan.hardware import Slice

ENGINES = ("skypilot", "gke", "gcloud")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
_SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|sk-[\w-]{20,})")


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A recipe (its text and file name) on a slice. bucket: a Cloud Storage bucket for output_dir,
    which all hosts must see. install: pip requirements. queue: Kueue's local queue. secret: name of
    the Kubernetes secret (key HF_TOKEN). restarts: how often a lost machine is replaced."""

    engine: str
    name: str
    recipe: str
    recipe_name: str
    slice: Slice
    spot: bool = False
    zone: str | None = None
    bucket: str | None = None
    install: tuple[str, ...] = ("headrace[tpu]",)
    image: str | None = None
    queue: str | None = None
    secret: str | None = None
    restarts: int = 10
    flags: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return num_hosts(self.slice)

    def train(self, recipe: str, output: str) -> str:
        """The command that every host runs; `recipe` and `output` are paths there."""
        words = ["headrace", "train", recipe, *self.flags]
        words += ["--output_dir", output, "--resume_from_checkpoint", "true"]
        return " ".join(shlex.quote(word) for word in words)

    def problems(self) -> list[str]:
        """Everything that is wrong, as sentences with what to do."""
        found = [*self._wrong_words(), *self._wrong_places()]
        if _SECRET.search(self.recipe) or any(_SECRET.search(flag) for flag in self.flags):
            found.append(
                "the recipe or a flag holds what looks like a secret key; take it out and give the "
                "machine a token through the engine's own store"
            )
        if self.hosts > 1 and self.bucket is None:
            found.append(
                f"{self.slice.name} has {self.hosts} hosts, which must all see output_dir: give "
                "--bucket"
            )
        if self.engine == "gke" and self.image is None:
            found.append("gke runs a container image with headrace in it: give --image")
        return found

    def _wrong_words(self) -> list[str]:
        rules = (
            ("name", self.name, _NAME, "small letters, digits and dashes, at most 40"),
            ("recipe", self.recipe_name, _FILE, "a file name of letters, digits, dots and dashes"),
            ("zone", self.zone, _ZONE, "a zone such as us-east5-a"),
            ("bucket", self.bucket, _BUCKET, "a bucket's name without gs://"),
            ("queue", self.queue, _NAME, "a Kubernetes name"),
            ("secret", self.secret, _NAME, "the name of a Kubernetes secret"),
        )
        return [
            f"--{name} {value!r} is not {needed}"
            for name, value, pattern, needed in rules
            if value is not None and not pattern.fullmatch(value)
        ]

    def _wrong_places(self) -> list[str]:
        found: list[str] = []
        if self.engine not in ENGINES:
            found.append(f"engine {self.engine!r} is not one of {', '.join(ENGINES)}")
        if not self.slice.is_tpu and self.engine != "skypilot":
            found.append(f"{self.slice.name} is a GPU machine: use --engine skypilot")
        tpu = TPU_NAMES.get(self.slice.chip.name)
        if tpu is not None and not tpu.accelerator and self.engine != "gke":
            found.append(f"{self.slice.name} is offered through GKE only: use --engine gke")
        if self.engine == "gcloud" and self.zone is None:
            found.append("gcloud needs --zone")
        return found


def write_launch(request: LaunchRequest, folder: Path) -> tuple[list[Path], list[str]]:
    """Write the engine's files; returns them and the command that starts the run in the folder.

    Raises ConfigError with all problems at once; nothing is written then. Starts nothing.
    """
    from headrace.launch import gcloud, gke, skypilot

    problems = request.problems()
    if problems:
        raise ConfigError("nothing was written:\n  " + "\n  ".join(problems))
    makers: Mapping[str, Callable[[LaunchRequest], tuple[dict[str, str], list[str]]]] = {
        "skypilot": skypilot.files,
        "gke": gke.files,
        "gcloud": gcloud.files,
    }
    texts, command = makers[request.engine](request)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        written.append(path)
    return written, command


def yaml_text(*documents: Any) -> str:
    """Documents as YAML, keys in their order; every string is quoted where it must be."""
    import yaml

    return "---\n".join(
        yaml.safe_dump(document, sort_keys=False, width=1000) for document in documents
    )
