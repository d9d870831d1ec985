"""Devices of a slice that nobody has rented: libtpu's ahead-of-time topologies.

The TPU compiler comes with `pip install 'headrace[tpu]'` and runs on Linux x86-64 without a TPU.
Everything that can stand in the way is told apart here: another system, no libtpu, a libtpu that
does not go with this JAX, a libtpu that another process holds.

Knows: libtpu. Does not know: models, programs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Generator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from headrace.errors import PlanError
from headrace.plan.hardware import Slice

INSTALL = "pip install 'headrace[tpu]'"
# Without these libtpu asks a metadata server that is not there, for minutes.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Compiling takes no TPU, so it may run beside a process that holds one.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compiler_obstacle() -> str | None:
    """Why no TPU program can be compiled on this machine; None when it can be tried."""
    system, machine = sys.platform, platform.machine().lower()
    if system != "linux" or machine not in ("x86_64", "amd64"):
        return (
            f"the TPU compiler (libtpu) exists for Linux on x86-64 only; this is {system} on "
            f"{machine}. The analytic model works here; for the compiled plan use such a machine "
            "or a container of it."
        )
    if importlib.util.find_spec("libtpu") is None:
        return f"libtpu is not installed, so nothing can be compiled for a TPU: {INSTALL}"
    return _version_obstacle()


def _version_obstacle() -> str | None:
    try:
        found = version("libtpu")
        wanted = [line for line in requires("jax") or [] if line.startswith("libtpu")]
    except PackageNotFoundError:
        return None
    if not wanted:
        return None
    from packaging.requirements import Requirement

    needed = Requirement(wanted[0]).specifier
    if needed.contains(found, prereleases=True):
        return None
    return (
        f"libtpu {found} is installed, jax {version('jax')} goes with libtpu {needed}: "
        f"pip install 'libtpu{needed}'"
    )


def prepare_environment() -> None:
    """Set what libtpu reads, where the user has not. Call before JAX starts a backend."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@functools.lru_cache(maxsize=64)
def topology_devices(each: Slice) -> list[Any]:
    """The devices of a TPU slice, for a Mesh that programs are compiled for.

    Raises PlanError: libtpu is missing, does not fit this JAX, is held by another process, or does
    not know the slice. Costs about a second the first time; needs no TPU and no network.
    """
    obstacle = compiler_obstacle()
    if obstacle:
        raise PlanError(obstacle)
    prepare_environment()
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            topology_name=each.topology_name, platform="tpu", **_options(each)
        )
    except Exception as error:  # jaxlib raises RuntimeError, ValueError or its own JaxRuntimeError
        raise PlanError(_explain(each, error)) from error
    devices: list[Any] = list(found.devices)
    assert len(devices) == each.num_devices, f"{each.name}: libtpu gave {len(devices)} devices"
    return devices


def _options(each: Slice) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    if each.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if each.chip.chip_config_name:
        options["chip_config_name"] = each.chip.chip_config_name
    return options


def _explain(each: Slice, error: Exception) -> str:
    text = str(error).strip()
    low = text.lower()
    if "lockfile" in low or "already in use" in low or "libtpu_lockfile" in low:
        return (
            "another process on this machine holds libtpu (/tmp/libtpu_lockfile). Wait for it, end "
            "it, or let both in with ALLOW_MULTIPLE_LIBTPU_LOAD=1.\n"
            f"libtpu says: {text[:300]}"
        )
    if "pjrt" in low and ("version" in low or "api" in low):
        return f"libtpu does not go with this jax: {INSTALL} installs the pair.\n{text[:300]}"
    return f"libtpu gives no devices for {each.name} ({each.topology_name}): {text[:400]}"


@contextlib.contextmanager
def into_compilation_cache(folder: Path) -> Generator[list[str]]:
    """Compile for a topology and keep what JAX's persistent cache writes; gives the files' names.

    An entry that is there already would be read, which fails without the devices: everything is
    compiled into an empty folder and moved.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    wanted: dict[str, Any] = {
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",  # as in a run: names know no folder
    }
    before = {name: getattr(jax.config, name) for name in (*wanted, "jax_compilation_cache_dir")}
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        for name, value in {**wanted, "jax_compilation_cache_dir": empty}.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        try:
            yield written
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
        for path in sorted(Path(empty).glob("*-cache")):
            path.replace(folder / path.name)
            written.append(path.name)


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """Compile for a topology with JAX's persistent cache off: it can write such an executable, but
    not read it back without the devices. Plans keep reports in a cache of their own.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
