"""`headrace doctor`: what this machine has, and what will not work on it.

Each check is a small function that returns findings; the exit code is 1 when one of them is an
error. Knows: versions, devices, memory, disk, caches. Starts no training and changes nothing; only
the device check imports jax.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import huge_pages

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

Level = Literal["ok", "warning", "error"]
LOW_DISK_BYTES = 5 * 2**30
LOW_MEMORY_BYTES = 2 * 2**30
SHOWN = (
    "torch", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "transformers", "peft", "optax",
    "orbax-checkpoint", "safetensors", "tokenizers", "datasets", "numpy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was looked at, what was found, how bad, and what to do."""

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> int:
    """Show versions, devices, memory, disk and caches, and name what will not work.

    Exit code 0 when training can start here, 1 when something must be mended first.
    """
    findings = [finding for check in CHECKS for finding in check()]
    if as_json:
        import json

        typer.echo(json.dumps([vars(finding) for finding in findings]))
    else:
        _show(findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def check_python() -> Iterator[Finding]:
    yield Finding(subject="python", found=f"{sys.version.split()[0]} at {sys.executable}")


def check_versions() -> Iterator[Finding]:
    """Installed versions, and each one outside the range that Headrace asks for."""
    wanted = _wanted_ranges()
    for name in ("headrace", *SHOWN):
        try:
            found = version(name)
        except PackageNotFoundError:
            if name in wanted:
                advice = f"pip install '{name}{wanted[name]}'"
                yield Finding(subject=name, found="missing", level="error", advice=advice)
            continue
        if name in wanted and not wanted[name].contains(found.split("+")[0], prereleases=True):
            advice = f"needs {wanted[name]}"
            yield Finding(subject=name, found=found, level="error", advice=advice)
        else:
            yield Finding(subject=name, found=found)


def check_combinations() -> Iterator[Finding]:
    """Packages that do not go together."""
    jax, jaxlib, torch = _version("jax"), _version("jaxlib"), _version("torch")
    if jax and jaxlib and jax.split(".")[:2] != jaxlib.split(".")[:2]:
        yield Finding(
            subject="jax + jaxlib",
            found=f"{jax} with {jaxlib}",
            level="error",
            advice="they are released together; install the same version of both",
        )
    if torch and "+cu" in torch:
        yield Finding(
            subject="torch",
            found=f"{torch}, a CUDA build",
            level="warning",
            advice="torch only traces; the CPU build saves gigabytes and keeps CUDA free for jax",
        )
    if _version("libtpu") and _version("jax-cuda13-plugin"):
        yield Finding(
            subject="libtpu + cuda",
            found="both are installed",
            level="warning",
            advice="set JAX_PLATFORMS=tpu or cuda, or jax may take the wrong device",
        )
    if _version("torchvision") and not _same_build("torch", "torchvision"):
        yield Finding(
            subject="torchvision",
            found=f"{_version('torchvision')} with torch {torch}",
            level="warning",
            advice="CPU and CUDA builds are mixed; transformers fails when it imports torchvision",
        )


def check_devices() -> Iterator[Finding]:
    """What jax computes on."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    try:
        import jax

        devices = jax.devices()
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        advice = f"JAX_PLATFORMS is {asked!r}; unset it, or install the extra: headrace[tpu|cuda]"
        yield Finding(subject="devices", found=reason, level="error", advice=advice)
        return
    first = devices[0]
    yield Finding(
        subject="devices", found=f"{len(devices)} x {first.device_kind} ({jax.default_backend()})"
    )
    if first.platform == "cpu" and (Path("/dev/nvidia0").exists() or Path("/dev/accel0").exists()):
        advice = "pip install 'headrace[cuda]' or 'headrace[tpu]'"
        found = "there is an accelerator, jax does not see it"
        yield Finding(subject="accelerator", found=found, level="warning", advice=advice)
    from headrace.sharding import device_memory

    memory = device_memory(first)
    if memory is not None:
        yield Finding(subject="device memory", found=f"{_gib(memory.limit)} each")


def check_memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available_memory() or total
    low = free < LOW_MEMORY_BYTES
    yield Finding(
        subject="host",
        found=f"{cores} cores, {_gib(total)} memory, {_gib(free)} free",
        level="warning" if low else "ok",
        advice="little memory is free; compilation alone can need 2 GiB" if low else "",
    )
    reason = huge_pages.obstacle()
    yield Finding(
        subject="huge pages",
        found=f"not used: {reason}" if reason else "used by the headrace commands",
        advice="" if reason else "in your own scripts: GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
    )


def check_storage() -> Iterator[Finding]:
    """Disk, the compilation cache and the Hugging Face cache."""
    for subject, folder in (
        ("disk here", Path.cwd()),
        ("compiled programs", _compilation_cache()),
        ("model cache", _hub_cache()),
    ):
        there = _nearest_existing(folder)
        free = shutil.disk_usage(there).free
        found = f"{_gib(free)} free at {folder}"
        if not os.access(there, os.W_OK):
            advice = f"{there} cannot be written to"
            yield Finding(subject=subject, found=found, level="error", advice=advice)
        elif free < LOW_DISK_BYTES:
            advice = "checkpoints and models may not fit"
            yield Finding(subject=subject, found=found, level="warning", advice=advice)
        else:
            yield Finding(subject=subject, found=found)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding(subject="hub", found="HF_HUB_OFFLINE is set: models and data come from disk")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python, check_versions, check_combinations, check_devices, check_memory, check_storage,
)  # fmt: skip


def _wanted_ranges() -> dict[str, SpecifierSet]:
    """What Headrace itself asks for, by package; empty when it is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = requires("headrace") or []
    except PackageNotFoundError:
        return {}
    parsed = [Requirement(line) for line in lines]
    return {each.name: each.specifier for each in parsed if each.marker is None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _same_build(first: str, second: str) -> bool:
    """Whether two packages carry the same local version (+cpu, +cu130)."""
    builds = {(_version(name) or "").partition("+")[2] for name in (first, second)}
    return len(builds) == 1


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _compilation_cache() -> Path:
    return Path("~/.cache/headrace/xla").expanduser()


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def _nearest_existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _show(findings: list[Finding]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    wide = max(len(finding.subject) for finding in findings)
    styles = {"ok": "", "warning": "yellow", "error": "bold red"}
    for finding in findings:
        mark = {"ok": " ", "warning": "!", "error": "x"}[finding.level]
        line = f"{mark} {finding.subject:<{wide}}  {finding.found}"
        console.print(line, style=styles[finding.level], markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"  {'':<{wide}}  -> {finding.advice}", markup=False, soft_wrap=True)
    bad = sum(finding.level == "error" for finding in findings)
    console.print(f"\n{bad} to mend" if bad else "\nReady.", style="bold")
