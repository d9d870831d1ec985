"""The restart with huge pages: once, with the same words, and only where it can help."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.cli import huge_pages

CODE = (
    "import os, sys; from headrace.cli.huge_pages import restart_with_huge_pages; "
    "restart_with_huge_pages(); "
    "print(os.environ.get('GLIBC_TUNABLES', ''), sys.argv[1:], os.getpid())"
)
possible = pytest.mark.skipif(huge_pages.obstacle() is not None, reason=str(huge_pages.obstacle()))


def start(**environment: str) -> tuple[str, int]:
    """What the restarted program prints, and the process id it was started under."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", huge_pages.SWITCH)}
    command = [sys.executable, "-c", CODE, "train", "a b.yaml"]
    with subprocess.Popen(
        command, env=clean | environment, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.strip(), process.pid


@possible
def test_the_process_starts_again_with_the_same_words_and_id() -> None:
    out, pid = start()
    assert out == f"glibc.malloc.hugetlb=1 ['train', 'a b.yaml'] {pid}"


@possible
def test_other_tunables_are_kept_and_an_own_choice_is_not_overruled() -> None:
    assert start(GLIBC_TUNABLES="glibc.malloc.check=0")[0].startswith(
        "glibc.malloc.check=0:glibc.malloc.hugetlb=1 "
    )
    assert start(GLIBC_TUNABLES="glibc.malloc.hugetlb=2")[0].startswith("glibc.malloc.hugetlb=2 ")


def test_the_switch_turns_it_off() -> None:
    assert start(**{huge_pages.SWITCH: "0"})[0].startswith("['train'")


@possible
def test_memory_is_really_in_huge_pages() -> None:
    code = (
        "import numpy, resource; "
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "before = faults(); numpy.ones(50_000_000); print(faults() - before)"
    )
    found: dict[str, int] = {}
    for value in ("0", "1"):
        environment = os.environ | {"GLIBC_TUNABLES": f"{huge_pages.TUNABLE}={value}"}
        environment["NUMPY_MADVISE_HUGEPAGE"] = "0"  # numpy asks for its own arrays otherwise
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        )
        found[value] = int(done.stdout)
    assert found["1"] < found["0"] / 50


@pytest.mark.parametrize(
    ("library", "expected"),
    [(("musl", "1.2.5"), "musl"), (("glibc", "2.31"), "2.31"), (("glibc", "2.36"), None)],
)
def test_old_or_other_libraries_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, library: tuple[str, str], expected: str | None
) -> None:
    if expected is None and huge_pages.obstacle() is not None:
        pytest.skip("no huge pages on this machine")
    monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: library)
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    found = huge_pages.obstacle()
    assert found is None if expected is None else expected in str(found)
