"""The notebook as a stranger runs it, from top to bottom, in a kernel: in a Colab of our own making, whose Drive
outlives its machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import generate
from tests.helpers import ROOT, generated_text
from tests.training.helpers import checkpoint_of
from training.records import read_metrics

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "notebooks" / "train_in_colab.ipynb"
# What the form fields of the cells are set to, for a model that trains in seconds.
TINY = "--device cpu --num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 8 --eval_batches 1"
SHORT = {
    "max_new_tokens": 10,
    "more_flags": f"{TINY} --vocab_size 300 --max_steps 600 --eval_interval 300 --log_interval 5",
}
COLAB = """
import json, pathlib, sys

def record(what, **more):
    with open({log!r}, "a") as file:
        file.write(json.dumps({{"what": what, **more}}) + "\\n")

class drive:
    @staticmethod
    def mount(point):
        point = pathlib.Path(point)
        assert not any(point.glob("*")), "Mountpoint must not already contain files"
        point.parent.mkdir(parents=True, exist_ok=True)
        point.symlink_to({drive!r})
        record("mount", point=str(point))

class files:
    @staticmethod
    def download(name):
        record("download", name=name, size=pathlib.Path(name).stat().st_size)

sys.modules["google.colab.drive"], sys.modules["google.colab.files"] = drive, files
"""


class Machine:
    """A machine of our Colab: a project, a kernel, and a Drive that is not mounted yet."""

    def __init__(self, folder: Path, drive: Path, fields: dict[str, Any]):
        self.project, self.content, self.log = folder / "content" / "gpt2", folder / "content", folder / "log"
        self.project.mkdir(parents=True)
        for path in ROOT.iterdir():  # what the notebook writes is not to lie in the checkout
            if not path.name.startswith(".") and path.name not in ("runs", "datasets_cache", "exported"):
                (self.project / path.name).symlink_to(path)
        package = folder / "packages" / "google" / "colab"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(COLAB.format(log=str(self.log), drive=str(drive)))
        self.notebook = nbformat.read(NOTEBOOK, as_version=4)
        for cell in self.notebook.cells:
            cell.source = cell.source.replace("/content/", f"{self.content}/")
            for name, value in fields.items():
                cell.source = re.sub(rf"(?m)^{name} = .*?(?=  # @param)", f"{name} = {value!r}", cell.source)
        self.steps = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        resources = {"metadata": {"path": str(self.project)}}
        self.client = nbclient.NotebookClient(self.notebook, timeout=240, kernel_name="python3", resources=resources)
        names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
        own = {name: str(folder / name.lower()) for name in names}
        self.environment = os.environ | own | {"PYTHONPATH": str(folder / "packages")}
        del self.environment["PYTEST_CURRENT_TEST"]  # by which a kernel knows a test, and shows less

    def run(self, step: int) -> str:
        """Run a cell, and return what it shows."""
        cell = self.steps[step - 1]
        try:
            self.client.execute_cell(cell, self.notebook.cells.index(cell))
        finally:
            assert "Traceback" not in shown(cell), shown(cell)
        return shown(cell)

    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def shown(cell: Any) -> str:
    """Return the outputs of a cell, joined."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        forms = (output.get("text"), data.get("text/markdown"), data.get("image/png"), output.get("evalue"))
        parts.append(next(filter(None, forms), ""))
    return "\n".join(parts)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive" / "MyDrive").mkdir(parents=True)
    return tmp_path / "drive"


def interrupt_once(machine: Machine, run: Path) -> threading.Thread:
    """Press the stop button, once, when the training has reported."""

    def press() -> None:
        while not read_metrics(run):
            time.sleep(0.02)
        asyncio.run(machine.client.km.interrupt_kernel())

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_from_top_to_bottom_with_a_stop_and_a_lost_machine(tmp_path: Path, drive: Path) -> None:
    machine = Machine(tmp_path / "first", drive, SHORT)
    run = machine.project / "runs" / "quickstart"
    with machine.client.setup_kernel(env=machine.environment):
        assert f"In {machine.project}" in machine.run(1)
        assert machine.run(2).count("Checkpoints are copied to") == 1
        assert machine.recorded() == [{"what": "mount", "point": str(machine.content / "drive")}]
        machine.run(3)
        assert "Dry run: no run was written" in machine.run(4) and not run.exists()
        presses = interrupt_once(machine, run)
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="Stopped"):
            machine.run(5)
        presses.join()
        text = shown(machine.steps[4])
        stopped = int(re.findall(r"Interrupted after step (\d+)", text)[0])
        assert stopped < 600 and "Run this cell again" in text
        assert "/600, loss" in text and "\r" not in text

    copies = Path("MyDrive") / "gpt2" / "checkpoints" / "quickstart"
    saved = copies / checkpoint_of(drive / copies, stopped).name
    shutil.rmtree(tmp_path / "first" / "content")
    machine = Machine(tmp_path / "second", drive, {**SHORT, "download": True})
    run, saved = machine.project / "runs" / "quickstart", machine.content / "drive" / saved
    with machine.client.setup_kernel(env=machine.environment):
        for step in range(1, 5):
            machine.run(step)
        told = machine.run(5)
        assert f"{saved}, the newest checkpoint, was restored" in told and f": step {stopped}" in told
        assert "exactly right" in told and "What is the capital of Egypt?" in told
        steps = [row["step"] for row in read_metrics(run)]
        assert set(range(5, 605, 5)) <= set(steps) and steps == sorted(set(steps))  # and the first of each session
        assert "This run is finished at step 600" in machine.run(5)
        curve, samples = machine.run(6).split("\n", 1)
        assert curve.startswith("iVBORw0KGgo") and "capital of Egypt" in samples
        assert "What is the capital of France?" in machine.run(7)
        assert "| bits per byte |" in machine.run(8)
        machine.run(9)
        assert "logits differ by" in machine.run(9)  # an older export is replaced
        run.rename(tmp_path / "elsewhere")
        for step, told in ((9, "exit code 4"), (10, "run step 9 first")):
            with pytest.raises(nbclient.exceptions.CellExecutionError, match=told):
                machine.run(step)
        (tmp_path / "elsewhere").rename(run)
        machine.run(9)
        machine.run(10)
        machine.run(11)
        (download,) = [entry for entry in machine.recorded() if entry["what"] == "download"]
        assert Path(download["name"]).name == "quickstart.zip" and download["size"] > 10_000


def test_your_own_text(tmp_path: Path, drive: Path) -> None:
    """Another vocabulary and other prompts; a second text is not confused with it."""
    fields = {"source": "path", "path": "mine.txt", "minutes": 1.0, "use_drive": False}
    fields |= {"sample_prompts": " Once | Wie heißt | ", "more_flags": f"{TINY} --compile off", "seconds_to_read": 1}
    machine = Machine(tmp_path / "first", drive, fields)
    for name, seed in (("mine", 0), ("other", 1)):
        (machine.project / f"{name}.txt").write_text(generated_text(3_000, seed))
    with machine.client.setup_kernel(env=machine.environment):
        told = "".join(machine.run(step) for step in range(1, 6))
        assert told.index("Expected") < told.index("Read the forecast above") < told.index("Training   ")
        assert "--minutes 1.0" in told and "the only size these flags allow" in told
        assert "Wie hei" in shown(machine.steps[4])
        assert "Once upon a time" in machine.run(7)
        machine.steps[2].source = machine.steps[2].source.replace("mine.txt", "other.txt")
        machine.steps[2].source = machine.steps[2].source.replace('run_name = ""', 'run_name = "mine"')
        machine.run(3)
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="exit code"):
            machine.run(4)
            machine.run(5)


def test_the_committed_notebook_has_not_been_run() -> None:
    """Outputs that nobody can check again would be believed. Forms have to be such, for Colab to show them."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert re.match(r"# @title \d+\. ", cell.source) and cell.metadata["cellView"] == "form"
            assert all(json.loads(form) for form in re.findall(r"# @param (.*)", cell.source))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_outside_colab(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from notebooks import notebook

    assert notebook.mount_drive(str(outside / "drive"), "MyDrive/gpt2") is None
    assert not (outside / "drive").exists() and "Not in Colab" in capsys.readouterr().out
    with pytest.raises(notebook.Stopped, match="Uploads work in Colab only"):
        notebook.get_text("upload", "", None)
    with pytest.raises(notebook.Stopped, match="No such file or folder"):
        notebook.get_text("path", "", None)
    Path("mine.txt").write_text("a text\n")
    text = notebook.get_text("path", "mine.txt", None)
    assert notebook.count_bytes(text) == 7
    Path("mine.txt").write_text("")
    with pytest.raises(notebook.Stopped, match=r"mine\.txt is empty"):
        notebook.get_text("path", "mine.txt", None)
    with pytest.raises(notebook.Stopped, match="ended with exit code 4"):
        notebook.run(generate.main, "--checkpoint", "runs/none")
    assert notebook.flags(max_steps=0, max_hours=1.5, checkpoint_dir=None) == ["--max_hours", 1.5]
