"""Helpers for the cells of notebooks/train_in_colab.ipynb. Each cell can be run again, and continues.

Scripts run inside the kernel, because Colab kills a command started with ! half a second after the stop button is
pressed, and saving a large model takes longer.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from common.errors import INTERRUPTED
from common.script import Script

BUILT_IN, UPLOAD, UPLOAD_ANOTHER = "built-in", "upload", "upload another"


class Stopped(Exception):
    """Ends this cell and the next ones with a sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:  # called by IPython
        return [str(self)]


def run(main: Script, *words: object) -> None:
    """Print the equivalent command, and run a script. Raises Stopped if it fails."""
    name, argv = f"{main.__module__.replace('.', '/')}.py", [str(word) for word in words]
    print(f"$ python {name} {shlex.join(argv)}\n", flush=True)
    code = main(argv)
    if code == INTERRUPTED:
        raise Stopped("Stopped. Run this cell again to continue.")
    if code:
        raise Stopped(f"{name} ended with exit code {code}. Its message above says what to do.")


def wait_for_reader(seconds: float) -> None:
    """Wait before the training begins, so that "Run all" leaves time to read the forecast."""
    print(
        f"The training starts in {seconds:.0f} seconds. Read the forecast above, or press the stop button.", flush=True
    )
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        raise Stopped("Not started. Change step 3 or 4, and continue from there.") from None


def flags(**values: object) -> list[object]:
    """Return values as flags, without those that are empty or 0."""
    return [word for name, value in values.items() if value for word in (f"--{name}", value)]


# Drive and the text


def _import_colab() -> Any:
    """Return the package google.colab; None outside Colab."""
    try:
        import google.colab
    except ImportError:
        return None
    return google.colab


def mount_drive(mount_point: str, folder: str) -> Path | None:
    """Mount Drive, and return the folder on it for what must outlive this machine; None outside Colab. Nothing may be
    written there before, because Drive cannot be mounted on a folder with files."""
    if _import_colab() is None:
        print("Not in Colab: no Drive is mounted, and checkpoints stay in runs/.")
        return None
    from google.colab import drive

    drive.mount(mount_point)
    kept = Path(mount_point) / folder
    if not kept.parent.is_dir():
        raise Stopped(f"No folder {kept.parent} on Drive. Choose a folder in MyDrive, such as MyDrive/gpt2.")
    kept.mkdir(exist_ok=True)
    print(f"Checkpoints are copied to {kept}")
    return kept


def get_text(source: str, path: str, drive: Path | None) -> Path | None:
    """Return the text to train on: an upload (kept on Drive, if mounted), or the one at `path`; None for the built-in
    text, which the quickstart's config names."""
    if source == BUILT_IN:
        return None
    if source in (UPLOAD, UPLOAD_ANOTHER):
        text = _find_upload(drive or Path("datasets_cache"), is_another=source == UPLOAD_ANOTHER)
    else:
        text = Path(path).expanduser()
        if not path or not text.exists():
            raise Stopped(f"No such file or folder: {path or '(no path was given)'}. Give the path of your text.")
    if not count_bytes(text):
        raise Stopped(f"{text} is empty. Choose another text.")
    print(f"Text       {text}, {count_bytes(text):,} bytes")
    return text


def _find_upload(kept: Path, is_another: bool) -> Path:
    """Return the last uploaded file, or ask for one."""
    folder = kept / "texts"
    uploaded = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if uploaded and not is_another:
        return uploaded[-1]
    if _import_colab() is None:
        raise Stopped("Uploads work in Colab only. Put your text beside the notebook, and give its path.")
    from google.colab import files

    received = files.upload()  # into the current folder
    if not received:
        raise Stopped("Nothing was uploaded. Run this cell again.")
    folder.mkdir(parents=True, exist_ok=True)
    name = next(iter(received))
    return Path(shutil.move(name, folder / Path(name).name))


def count_bytes(text: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [text] if text.is_file() else [path for path in text.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def write_prompts(prompts: str, file: Path) -> Path | None:
    """Write a file for --eval_prompts from prompts separated by |. Return None if there are none."""
    lines = [prompt.strip() for prompt in prompts.split("|") if prompt.strip()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in lines), encoding="utf-8")
    return file if lines else None


# Results


def show(run_dir: Path) -> None:
    """Show a run's losses, and what it answered, in a cell."""
    from IPython.display import Image, Markdown, display

    display(Image(run_dir / "loss_curve.png", width=800))
    display(Markdown((run_dir / "samples.md").read_text(encoding="utf-8")))


def download(out: Path) -> None:
    """Download the exported folder as a zip file, and the file for llama.cpp, if any. Outside Colab, print their
    paths."""
    files = [Path(shutil.make_archive(str(out), "zip", out)), out.with_suffix(".gguf")]
    for file in filter(Path.exists, files):
        if _import_colab() is None:
            print(f"{file.resolve()}, {file.stat().st_size:,} bytes")
        else:
            from google.colab import files as browser

            browser.download(str(file))
