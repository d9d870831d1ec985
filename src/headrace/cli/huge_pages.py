"""Huge pages for the arrays of a step that runs on the host.

A step's temporaries come from malloc and go back to the kernel after every call, so each step pays
a page fault for every 4 KiB of them: 218,000 faults and a fifth of the CPU time for a 22M-parameter
classifier at [32, 64] (docs/experiments.md). glibc 2.35 and newer can ask for 2 MiB pages instead,
but only when a variable says so before the process starts; hence the restart.

Knows: Linux, glibc, exec. Does not know: the commands.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb"
SWITCH = "HEADRACE_HUGE_PAGES"
_KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def obstacle() -> str | None:
    """Why this process cannot have its arrays in huge pages; None when it can, or has them."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not Linux"
    library, version = platform.libc_ver()
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if library != "glibc" or number < (2, 35):
        return f"the C library is {library or 'unknown'} {version}, glibc 2.35 or newer is needed"
    setting = _KERNEL_SETTING.read_text() if _KERNEL_SETTING.exists() else "[never]"
    if "[never]" in setting:
        return f"the kernel has none: {_KERNEL_SETTING} says never"
    return None


def asked_for() -> bool:
    """True when this process was started with the setting, whatever its value."""
    return TUNABLE in os.environ.get("GLIBC_TUNABLES", "")


def restart_with_huge_pages() -> None:
    """Replace this process by one whose malloc uses 2 MiB pages; the same process id and terminal.

    Returns when that is not possible, not needed, or HEADRACE_HUGE_PAGES=0. To be called before
    anything is imported that is worth keeping; costs one interpreter start, about 20 ms.
    """
    if os.environ.get(SWITCH) == "0" or asked_for() or obstacle() is not None:
        return
    if not sys.executable or not sys.orig_argv:
        return
    before = os.environ.get("GLIBC_TUNABLES")
    tunables = f"{TUNABLE}=1" if not before else f"{before}:{TUNABLE}=1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, "GLIBC_TUNABLES": tunables},
    )
