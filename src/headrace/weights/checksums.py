"""SHA-256 of weight files: written beside what is saved here, compared before it is read.

    SHA256SUMS    a line for each file, as `sha256sum -c SHA256SUMS` takes it

Safetensors has no checksum of values. Large files in the Hugging Face cache are links to files that
are named by the hub's SHA-256, so they can be compared too. Hashing reads a file once more than
loading does, several files at a time.

Knows: files, digests. Does not know: what is in them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import CheckpointError

SUMS = "SHA256SUMS"
THREADS = 4  # each hashes a file, without Python's lock
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: str | Path, known: Mapping[str, str] | None = None) -> None:
    """Write SHA256SUMS for the safetensors files of a folder; known: digests by file name."""
    root, known = Path(folder), known or {}
    names = sorted(path.name for path in root.glob("*.safetensors"))
    digests = _digests(root, [name for name in names if name not in known]) | dict(known)
    lines = [f"{digests[name]}  {name}\n" for name in names]
    (root / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: str | Path, *, hub: bool = False, share: tuple[int, int] = (0, 1)) -> None:
    """Compare weight files with SHA256SUMS beside them; nothing without it.

    hub: those of the Hugging Face cache with the hub's digest too. share: (index, count), to
    compare one part of the files in each of several processes. Raises CheckpointError listing every
    file that is not what was written, and what to do.
    """
    root = Path(folder)
    expected = _written(root)
    if hub:
        expected = {**_of_hub(root), **expected}
    present = sorted(name for name in expected if (root / name).is_file())
    found = _digests(root, present[share[0] :: share[1]])
    wrong = [name for name, digest in found.items() if digest != expected[name]]
    if not wrong:
        return
    lines = [f"{name}: SHA-256 {found[name][:16]}..., expected {expected[name][:16]}..."
             for name in wrong]  # fmt: skip
    remedy = (
        "Copy them again from where they came from"
        if (root / SUMS).is_file()
        else "Delete them and download them again"
    )
    raise CheckpointError(
        f"{len(wrong)} of {len(present)} weight files in {root} are not what was written:\n  "
        + "\n  ".join(lines)
        + f"\n{remedy}. If you changed them on purpose, delete {SUMS}."
    )


def _written(root: Path) -> dict[str, str]:
    if not (root / SUMS).is_file():
        return {}
    lines = (root / SUMS).read_text(encoding="utf-8").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    bad = [line for line, match in zip(lines, matches, strict=True) if match is None]
    if bad:
        raise CheckpointError(
            f"{root / SUMS} has lines that are no checksums, such as {bad[0][:80]!r}; write it "
            "again with `sha256sum *.safetensors`, or delete it"
        )
    return {match[2]: match[1] for match in matches if match and "/" not in match[2]}


def _of_hub(root: Path) -> dict[str, str]:
    """Digests that the names of linked files in the Hugging Face cache are."""
    linked = {path.name: path.resolve().name for path in root.glob("*.safetensors")
              if path.is_symlink()}  # fmt: skip
    return {name: target for name, target in linked.items() if _DIGEST.fullmatch(target)}


def _digests(root: Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(sha256, [root / name for name in names]), strict=True))
