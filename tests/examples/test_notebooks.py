"""The notebooks run from top to bottom as they are shipped: tiny models, no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs pip install headrace[notebooks]")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def test_there_are_three() -> None:
    assert NAMES == [
        "banking77_classification.ipynb", "gemma_lora_alpaca.ipynb", "plain_pytorch_loop.ipynb",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(FOLDER / name, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "stored without outputs"
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert os.listdir(FOLDER) and all("error" not in str(c.get("outputs")) for c in book.cells)
