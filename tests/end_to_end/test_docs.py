"""Every command of the documents beside the README is run as it is typed, on small text and with a small model.

One that needs what a test has not says so in a comment behind it (MARKS); its flags are read by its script. So are
those of commands in running text, and of the results in docs/benchmarks, which stand as they were made.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.commands import (
    MARKS,
    SCRIPTS,
    TOOLS,
    commands,
    mentioned,
    no_more_input,
    require_understood,
    run,
)
from tests.helpers import ROOT, generated_text
from tests.models import write_model
from tests.tokenization.documents import epub

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
}
RECORDS = [page for page in PAGES if page.startswith("docs/benchmarks/")]
RUN_HERE = [
    page for page in PAGES if commands("bash", PAGES[page]) and page not in RECORDS and page != "README.md"
]  # test_readme.py runs the README


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README leaves it: text, its tokens in datasets_cache, a model in runs/gpt2_small; and one as if
    imported, in pretrained/gpt2."""
    folder = tmp_path_factory.mktemp("trained")
    write_model(folder / "pretrained/gpt2", num_layers=1, num_heads=2, max_seq_len=32)
    for name, seed in (("my_text.txt", 0), ("more_text.txt", 1), ("english.txt", 2), ("german.txt", 3)):
        (folder / name).write_text(generated_text(6_000, seed))
    chats = [{"prompt": f"Fox {i}?", "completion": f"The fox number {i} sleeps."} for i in range(100)]
    (folder / "my_chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "records.jsonl").write_text(json.dumps({"text": generated_text(500)}) + "\n")
    with gzip.open(folder / "notes.md.gz", "wt") as file:
        file.write(generated_text(500))
    (folder / "my_folder").mkdir()
    (folder / "my_folder" / "book.epub").write_bytes(epub([f"<p>{generated_text(3_000, i)}</p>" for i in range(9)]))
    (folder / "my_folder" / "notes.txt").write_text(generated_text(3_000, 9))
    (folder / "my_code" / "package").mkdir(parents=True)
    for path in ("my_code/first.py", "my_code/package/second.py"):
        (folder / path).write_text(f'"""{generated_text(9_000)}"""\n')
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert run("python tokenize_local_bpe.py --input my_text.txt") == 0
        assert run("python train_colab_mmap.py --config gpt2_small.json") == 0
    return folder


@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_run_in_the_order_they_are_read(page, trained, tmp_path, monkeypatch, capsys):
    """Those without a mark, each to its exit code 0."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", no_more_input)
    for command in commands("bash", PAGES[page]):
        if not command.is_marked:
            words = command.text.split()
            assert words[:1] == ["python"] and words[1] in SCRIPTS | TOOLS, (
                f"{page}: no test can run {command.text!r}; behind it has to stand '# ' and one of: {', '.join(MARKS)}"
            )
            assert run(command.text) == 0, (command, capsys.readouterr())


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_commands_that_are_not_run_are_understood(page, monkeypatch):
    blocks = commands("bash", PAGES[page])
    not_run = [command.text for command in blocks if page in RECORDS or command.is_marked]
    for command in [*not_run, *mentioned(PAGES[page])]:
        require_understood(command, monkeypatch)
