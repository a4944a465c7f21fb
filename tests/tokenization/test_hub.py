"""Datasets on the Hugging Face hub, from a local server that answers like it."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, generated_text
from tests.tokenization.test_extract import documents, report

pytestmark = pytest.mark.extras("huggingface_hub")
COMMITS = ("a" * 40, "b" * 40)


class Hub:
    """A server with one dataset, o/d."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commit = COMMITS[0]
        self.failures = 0  # of the next requests for content
        self.broken = ""  # a file
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
                self.send_response(code)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                hub.asked.append(self.path)
                path = self.path.partition("?")[0]
                if re.fullmatch(r"/api/datasets/o/d(/revision/\w+)?", path):
                    known = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
                    described = {"id": "o/d", "sha": hub.commit, "siblings": known, "tags": [], "private": False}
                    self.answer(200, json.dumps(described).encode(), Content_Type="application/json")
                elif found := re.fullmatch(r"/api/datasets/o/d/tree/\w+/?(.*)", path):
                    inside = [name for name in hub.files if os.path.dirname(name) == found[1]]
                    rows = [{"type": "file", "path": p, "size": len(hub.files[p]), "oid": "0" * 40} for p in inside]
                    self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
                elif found := re.fullmatch(r"/datasets/o/d/resolve/\w+/(.*)", path):
                    if hub.failures or found[1] == hub.broken:
                        hub.failures -= bool(hub.failures)
                        self.answer(404 if found[1] == hub.broken else 503)
                        return
                    content = hub.files[found[1]]
                    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
                    assert asked, "a part is asked for, not the file"
                    first, last = int(asked[1]), int(asked[2])
                    of = f"bytes {first}-{last}/{len(content)}"
                    self.answer(206, content[first : last + 1], Content_Range=of)
                else:
                    self.answer(404, X_Error_Code="RepoNotFound")

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    hub = Hub()
    hub.files = {
        "README.md": b"# A dataset\n",
        "data/a.jsonl": b"".join(b'{"text": "a %d"}\n' % i for i in range(5)),
        "data/b.txt": b"A text.",
        "other/c.csv": b"text\nc\n",
        "data/d.png": b"no",
    }
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(hub: Hub, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": os.path.abspath("hf")}
    argv = [sys.executable, str(ROOT / script), *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, env=environment)


def tokenize(hub: Hub, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    given = ["--input", address, "--output_dir", "out", "--vocab_size", "300", *flags]
    return run(hub, "tokenize_local_bpe.py", *given)


def test_the_files_of_a_dataset_are_read_at_one_commit(hub: Hub) -> None:
    hub.failures = 1  # it tries again
    done = tokenize(hub, "hf://datasets/o/d")
    assert done.returncode == 0, done.stderr
    assert sorted(documents()) == sorted([*(f"a {i}" for i in range(5)), "A text.", "c"])
    assert f"| datasets/o/d@{COMMITS[0]}/data/b.txt |" in report()
    assert COMMITS[0] in Path("out/tokens_bpe_metadata.json").read_text()
    hub.commit = COMMITS[1]
    hub.asked.clear()
    assert tokenize(hub, "hf://datasets/o/d", "--vocab_size", "301").returncode == 0
    assert not any("o/d" in path for path in hub.asked), "all of it is there"
    assert tokenize(hub, "hf://datasets/o/d@main/data/*.txt").returncode == 0
    assert documents() == ["A text."] and f"@{COMMITS[1]}/data/b.txt" in report()


def test_a_download_that_breaks_continues_with_the_other_files(hub: Hub) -> None:
    hub.files["data/z.txt"] = b"The last."
    hub.broken = "data/z.txt"
    done = tokenize(hub, "hf://datasets/o/d/data/*")
    assert done.returncode == 3 and "data/z.txt cannot be read" in done.stderr
    hub.broken = ""
    hub.asked.clear()
    assert tokenize(hub, "hf://datasets/o/d/data/*").returncode == 0
    assert {path for path in hub.asked if "/resolve/" in path} == {f"/datasets/o/d/resolve/{COMMITS[0]}/data/z.txt"}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://datasets/o/none", "cannot be read"),
        ("hf://datasets/o/d/nothing/*", "names no text file. The dataset has README.md"),
        ("hf://models/o/d", "does not have the form"),
    ],
)
def test_missing_files_are_one_sentence(hub: Hub, address: str, said: str) -> None:
    done = tokenize(hub, address)
    assert done.returncode == 3 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_without_a_network_it_says_so(hub: Hub) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    done = tokenize(hub, "hf://datasets/o/d")
    assert done.returncode == 3 and "cannot be read" in done.stderr and len(done.stderr.splitlines()) == 1


def train(hub: Hub, *flags: str) -> subprocess.CompletedProcess[str]:
    quick = "--minutes 2 --epochs 1 --num_layers 2 --embed_dim 64 --device cpu --compile off"
    return run(hub, "train_colab_mmap.py", *quick.split(), *flags)


def test_the_trainer_reads_as_much_of_a_dataset_as_the_minutes_hold(hub: Hub) -> None:
    hub.files = {f"data/{name}.txt": generated_text(25_000, seed).encode() for seed, name in enumerate("abc")}
    Path("mine.txt").write_text(generated_text(10_000, seed=9))
    done = train(hub, "--input", "mine.txt", "--companion", "hf://datasets/o/d/data/*.txt")
    assert done.returncode == 0, done.stderr
    config = json.loads(Path("runs/mine/config.json").read_text())["config"]
    assert 0 < config["max_mb"] <= 1 and config["companion"] == "hf://datasets/o/d/data/*.txt"
    assert "Expected" in done.stdout and "Copied" in Path("runs/mine/summary.md").read_text()
    done = train(hub, "--input", "hf://datasets/o/d", "--max_mb", "0.02", "--dry_run")
    assert done.returncode == 0 and "20.0 kB of text" in done.stdout, done.stderr


def test_a_companion_that_cannot_be_read_is_reported_before_anything_is_trained(hub: Hub) -> None:
    Path("mine.txt").write_text(generated_text(20_000, seed=9))
    done = train(hub, "--input", "mine.txt", "--companion", "hf://datasets/o/none")
    assert done.returncode == 3 and "hf://datasets/o/none cannot be read" in done.stderr and not Path("runs").exists()
