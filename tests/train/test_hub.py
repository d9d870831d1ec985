"""push_to_hub against a local stand-in that speaks the hub's protocol over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from headrace.config import SFTConfig
from headrace.errors import ConfigError, TrainingError
from headrace.train.hub import push


class StandIn(BaseHTTPRequestHandler):
    """Creates repositories and takes commits, kept in memory; `refuse` makes it say no."""

    repos: dict[str, dict[str, bytes]] = {}  # noqa: RUF012  # shared by all requests
    private: dict[str, Any] = {}  # noqa: RUF012
    refuse = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.refuse:
            self._answer({"error": "You don't have the rights"}, 403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.repos.setdefault(name, {})
            self.private[name] = asked.get("private", asked.get("visibility") == "private")
            self._answer({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self._answer({"files": answer})
        elif "/commit/main" in self.path:
            name = "/".join(self.path.split("/")[3:5])
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    content = base64.b64decode(item["value"]["content"])
                    self.repos[name][item["value"]["path"]] = content
            url = f"http://{self.headers['Host']}/{name}/commit/abc"
            self._answer({"commitUrl": url, "commitOid": "abc", "success": True})
        else:
            self._answer({"errors": [], "warnings": []})  # validate-yaml

    def do_GET(self) -> None:
        self._answer({"sha": "abc", "id": "me/tiny", "siblings": []})

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_local_stand_in")
    StandIn.repos, StandIn.private, StandIn.refuse = {}, {}, False
    yield StandIn
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    for name in ("adapter_config.json", "README.md", "report.html"):
        (tmp_path / name).write_text(f"{{}} {name}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00\x01weights")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "train_state.safetensors").write_bytes(b"optimizer")
    (tmp_path / "log.jsonl").write_text("{}")
    return tmp_path


def test_the_run_goes_up_without_its_checkpoints(hub: type[StandIn], finished: Path) -> None:
    address = push(finished, "me/tiny", private=True, message="Trained")
    assert address.endswith("/me/tiny")
    assert sorted(hub.repos["me/tiny"]) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "report.html",
    ]  # fmt: skip
    assert hub.repos["me/tiny"]["adapter_model.safetensors"] == b"\x00\x01weights"
    assert hub.private["me/tiny"] is True
    push(finished, "me/tiny", private=None, message="Again")


def test_a_refusal_says_what_to_do_and_keeps_the_files(hub: type[StandIn], finished: Path) -> None:
    hub.refuse = True
    with pytest.raises(TrainingError, match=r"upload to me/tiny failed.*hf upload me/tiny"):
        push(finished, "me/tiny", private=None, message="Trained")
    assert (finished / "adapter_model.safetensors").is_file()


def test_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="push_to_hub needs the repository"):
        SFTConfig(push_to_hub=True)
