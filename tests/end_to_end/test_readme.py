"""Every command of the README, and of the pages whose commands need extras, is run as it is typed, on small text and
with a small model."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import tools.export_hf
from tests.end_to_end import commands as documents
from tests.end_to_end.commands import SCRIPTS, run
from tests.helpers import ROOT
from tests.models import write_model
from tests.serving.servers import started

README, CONTRIBUTING, SERVING, ELSEWHERE, CONFIGS, CHOOSING = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/serving.md",
        "docs/exchange.md",
        "configs/README.md",
        "docs/choosing.md",
    )
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def commands(language: str, text: str = README) -> list[str]:
    """The command lines in code blocks of one language, by default of the README."""
    return [command.text for command in documents.commands(language, text)]


def test_commands_run_in_the_order_they_are_read(tmp_path, monkeypatch, capsys):
    """Each command, from the quickstart to characters, ends with exit code 0 in one folder."""
    monkeypatch.chdir(tmp_path)
    sentence = "The quick brown fox number {} jumps over the lazy dog {} and sleeps.\n"
    Path("my_text.txt").write_text("".join(sentence.format(i, i * 7) for i in range(600)))
    Path("more_text.txt").write_text(sentence.format(7, 700))
    ran = []
    for command in commands("bash"):
        command = command.partition("&& ")[2] or command
        if not command.startswith(("pip", "pytest")):
            assert run(command) == 0, (command, capsys.readouterr())
            ran.append(command)
    scripts = {word for command in ran for word in shlex.split(command) if word.endswith(".py")}
    assert scripts == set(SCRIPTS)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.extras("gradio")
def test_a_page_shows_a_model(tmp_path):
    write_model(tmp_path / "runs/gpt2_small/checkpoints/step_00000001")
    command, _ = commands("bash", SERVING)
    words = shlex.split(command)
    assert words[:2] == ["python", "tools/web_demo.py"]
    with started(tmp_path, *words[2:], tool="web_demo") as demo:
        assert demo.port


@pytest.mark.extras("transformers", "gguf")
def test_a_model_goes_elsewhere_and_another_comes_in(tmp_path, monkeypatch, capsys):
    """The hub is replaced by a folder with a GPT-2 of the shape that the trainer gets here."""
    import huggingface_hub

    shape = {"num_layers": 1, "num_heads": 2, "max_seq_len": 32}
    write_model(tmp_path / "gpt2", tie_embeddings=True, activation="gelu_tanh", **shape)
    assert tools.export_hf.main([str(tmp_path / "gpt2"), str(tmp_path / "hub")]) == 0
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    write_model(Path("runs/gpt2_small/checkpoints/step_00000001"))
    Path("my_text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 600)
    for command in commands("bash", ELSEWHERE):
        assert run(command) == 0, (command, capsys.readouterr())
    assert Path("exported/gpt2_small/README.md").exists() and Path("runs/finetuned/best/manifest.json").exists()


@pytest.mark.extras("gguf", "xllamacpp", "openai")
def test_a_program_talks_to_a_model(tmp_path, capsys):
    """The example is run as it stands but for the port, which may be taken here."""
    write_model(tmp_path / "runs/gpt2_small/checkpoints/step_00000001")
    _, command = commands("bash", SERVING)
    words = shlex.split(command)
    assert words[:2] == ["python", "tools/serve.py"]
    with started(tmp_path, *words[2:]) as server:
        example = "\n".join(commands("python", SERVING)).replace(":8000/", f":{server.port}/")
        exec(example, {})  # noqa: S102
    assert capsys.readouterr().out.endswith("\n")  # after a text that may end before it begins


def test_colab_cell_runs(tmp_path, monkeypatch, capsys):
    """The scripts' lines of the Colab cell, with its folders moved below a temporary one."""
    monkeypatch.chdir(tmp_path)
    drive = tmp_path / "content" / "drive" / "MyDrive"
    drive.mkdir(parents=True)
    text = "".join(f"Line {i} of a text about {i * i}.\n" for i in range(900))
    (tmp_path / "content" / "my_text.txt").write_text(text)
    lines = [line.removeprefix("!") for line in commands("python") if line.startswith("!python")]
    assert len(lines) == 2
    for line in lines:
        assert run(line.replace("/content/", f"{tmp_path}/content/")) == 0, (line, capsys.readouterr())
    assert list(drive.glob("checkpoints/my_text/step_*/manifest.json"))


def test_the_address_is_filled_in_when_there_is_one(tmp_path: Path) -> None:
    """The command in CONTRIBUTING.md puts the remote's address into the badge, the cell and the notebook."""
    pages, placeholder = ["README.md", "notebooks/train_in_colab.ipynb"], "OWNER/REPOSITORY"
    remotes = subprocess.run(["git", "remote", "-v"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    unfilled = [page for page in pages if placeholder in (ROOT / page).read_text(encoding="utf-8")]
    assert "github.com" not in remotes or not unfilled, "CONTRIBUTING.md, Hosting it on GitHub"

    for page in pages:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    command = re.search(r"^    (address=.*)$", CONTRIBUTING, flags=re.MULTILINE)
    assert command
    script = f"git init -q && git remote add origin git@github.com:me/my-gpt.git && {command[1]}"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    for page in unfilled:
        filled = (tmp_path / page).read_text(encoding="utf-8")
        assert "github.com/me/my-gpt" in filled and placeholder not in filled


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_that_are_named_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    linked = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)[)#]", text)]
    folders = (
        "tests|training|tokenization|generation|common|exchange|serving|tools|benchmarks|notebooks|docs|examples|"
        "configs|[.]ci"
    )
    named = [ROOT / name.rstrip(".") for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*)", text)]
    there = [*linked, *(name for name in named if not (path.parent / name.relative_to(ROOT)).exists())]
    assert [str(name) for name in there if not name.exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_page_name_a_heading_of_it(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text(encoding="utf-8"))
    missing = [(page, name) for page, name in links if name not in anchors(path.parent / page if page else path)]
    assert missing == []


def test_the_map_names_every_file_of_the_wings() -> None:
    """The map names no missing file. A second name in a line is in the folder of the first."""
    found = re.findall(r"^```text\n(.*?)^```", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)[0]
    named = set()
    for line in found.splitlines():
        folder = ""
        for name in re.findall(r"[\w/]+\.py", line):
            folder = f"{Path(name).parent}/" if "/" in name else folder
            named.add(f"{folder}{Path(name).name}")
    wings = [path for wing in ("tokenization", "training", "generation") for path in (ROOT / wing).rglob("[a-z]*.py")]
    files = {path.relative_to(ROOT).as_posix() for path in [*wings, *ROOT.glob("*.py")]}
    assert named == files
