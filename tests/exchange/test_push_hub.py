"""Uploads, to a server on this machine that speaks as the Hugging Face Hub does. No test leaves the machine."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import importlib.util
import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from common.errors import ConfigError, UserError
from exchange import push_hub

# tokenizers brings one; before tokenizers 0.22 an older one than requirements-extras.txt allows.
pytest.importorskip("huggingface_hub", minversion="1.3")
constants = importlib.import_module("huggingface_hub.constants")
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore::DeprecationWarning:httpx2")]
TOKEN = "hf_secretSECRETsecret"
REPO = "ada/engine"
FILES = {"config.json": b"{}\n", "README.md": b"# A model\n", "model.safetensors": bytes(range(256)) * 50}


@dataclass
class Hub:
    """What the server was asked, what it holds, and how it answers."""

    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    created: dict[str, Any] | None = None
    repository: dict[str, Any] | None = None  # as it was before
    objects: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    files: dict[str, bytes] = field(default_factory=dict)  # as committed
    refuse: dict[str, int] = field(default_factory=dict)  # end of a path: status


class Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *details: Any) -> None:
        self.hub = hub
        super().__init__(*details)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if not path.startswith("/storage/"):
            self.hub.tokens.add(self.headers.get("Authorization"))
        for end, status in self.hub.refuse.items():
            if path.endswith(end):
                return self.answer({"error": f"no. You said {self.headers.get('Authorization')}"}, status)
        status, value = self.respond(path, body)
        self.answer(value, status)

    do_GET = do_PUT = do_POST

    def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.hub
        if path.startswith("/storage/"):
            hub.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            if hub.repository is not None:
                return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{REPO}"}
            hub.created = asked
            private = asked.get("private", asked.get("visibility") == "private")
            hub.repository = {"id": REPO, "private": private}
            return 200, {"url": f"{hub.url}/{REPO}", "name": REPO}
        if path == f"/api/models/{REPO}":
            return (200, hub.repository) if hub.repository else (404, {"error": "Repository not found"})
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == f"/api/models/{REPO}/preupload/main":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/storage/{entry['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}
        if path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            return 200, {"commitUrl": f"{hub.url}/{REPO}/commit/{'a' * 40}", "commitOid": "a" * 40}
        return 501, {"error": f"the test does not know {path}"}

    def answer(self, value: Any, status: int) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *details: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HF_ENDPOINT": state.url, "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    # Large files go another way where the package for it is there, by a service that no test can stand in for.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_folder_is_uploaded_to_a_new_private_repository(hub: Hub, folder: Path, capfd: Any) -> None:
    pushed = push_hub.push(folder, REPO)
    assert pushed == push_hub.Pushed(f"{hub.url}/{REPO}", private=True)
    assert str(pushed) == f"{hub.url}/{REPO} (private)"
    assert hub.files == FILES
    assert list(hub.objects) == [hashlib.sha256(FILES["model.safetensors"]).hexdigest()]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in "".join(capfd.readouterr())


def test_public_only_where_it_was_asked_for(hub: Hub, folder: Path) -> None:
    assert push_hub.push(folder, REPO, public=True) == push_hub.Pushed(f"{hub.url}/{REPO}", private=False)
    hub.files.clear()
    with pytest.raises(UserError, match="is public and --public was not given; add it, or name another"):
        push_hub.push(folder, REPO)
    assert not hub.files
    assert not push_hub.push(folder, REPO, public=True).private
    hub.repository = {"id": REPO, "private": True}
    assert push_hub.push(folder, REPO, public=True).private  # as it was: told, not changed
    assert hub.files == FILES


@pytest.mark.parametrize("refused", [None, "/preupload/main", "/commit/main"])
def test_as_it_is_uploaded_with_the_package_for_large_files(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str | None
) -> None:
    """In steps that overlap, some of them in other threads."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False, raising=False)
    (folder / "model.safetensors").unlink()
    if refused is None:
        push_hub.push(folder, REPO)
        assert hub.files == {name: FILES[name] for name in ("config.json", "README.md")}
        return
    hub.refuse[refused] = 403
    with pytest.raises(UserError, match=r"does not let this token write to ada/engine \(403\)"):
        push_hub.push(folder, REPO)
    assert not hub.files


@pytest.mark.parametrize("where", ["/api/repos/create", "/preupload/main", "/commit/main", "/objects/batch"])
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, r"does not accept the token \(401\); make one that may write at https://"),
        (403, r"does not let this token write to ada/engine \(403\); make one"),
        (404, r"knows no user or organization ada, or hides it from this token \(404\)"),
        (400, r"refused the upload to ada/engine \(400\): .*no\. You said Bearer \.\.\."),
    ],
)
def test_a_refusal_is_one_sentence_without_the_token(
    hub: Hub, folder: Path, where: str, status: int, words: str
) -> None:
    hub.refuse[where] = status
    with pytest.raises(UserError, match=words) as refused:
        push_hub.push(folder, REPO)
    assert refused.value.exit_code == 2
    told = "".join(traceback.format_exception(refused.value))
    assert TOKEN not in told and "\n" not in str(refused.value)
    assert not hub.files


def test_without_a_network(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard, which nobody serves
    with pytest.raises(UserError, match=r"at http://127\.0\.0\.1:9 cannot be reached \(.+\); try again when it can\."):
        push_hub.push(folder, REPO)


def test_tokens(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_with a\N{BULLET}")
    with pytest.raises(UserError, match="characters that no token has") as refused:
        push_hub.push(folder, REPO)
    assert "hf_with" not in str(refused.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="There is no Hugging Face token: set HF_TOKEN to one that may write"):
        push_hub.push(folder, REPO)
    assert not hub.requests
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", TOKEN)
    push_hub.push(folder, REPO)
    assert hub.files == FILES


@pytest.mark.parametrize("name", ["engine", "ada/", "/engine", "ada/engine/2", "ada/my engine", "https://a/b", "../b"])
def test_other_names_are_refused(hub: Hub, folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no repository of the Hugging Face Hub; write it as USER/NAME"):
        push_hub.push(folder, name)
    assert not hub.requests


def test_what_is_missing_is_said(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "nothing"):
        with pytest.raises(ConfigError, match=f"There is no folder .*{name} to upload"):
            push_hub.push(folder / name, REPO)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package huggingface_hub: pip install -r requirements-extras"):
        push_hub.push(folder, REPO)
    assert not hub.requests
