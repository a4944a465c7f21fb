"""What the cells of notebooks/train_in_colab.ipynb need beside the scripts. Each cell can be run again, and continues.

The scripts run inside the kernel: Colab kills a command started with ! half a second after its stop button is pressed,
and saving a large model takes longer.
"""

from __future__ import annotations

import html
import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from common.errors import INTERRUPTED
from common.script import Script
from serving.run_reader import RunReader
from serving.watch_page import named, page

BUILT_IN, UPLOAD, UPLOAD_ANOTHER = "built-in", "upload", "upload another"


class Stopped(Exception):
    """Ends a cell, and the cells after it, with a sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:  # the name by which IPython asks
        return [str(self)]


def run(main: Script, *words: object) -> None:
    """Run a script, after printing the command that does the same in a terminal. Raises Stopped if it fails."""
    name, argv = f"{main.__module__.replace('.', '/')}.py", [str(word) for word in words]
    print(f"$ python {name} {shlex.join(argv)}\n", flush=True)
    code = main(argv)
    if code == INTERRUPTED:
        raise Stopped("Stopped. The progress is kept: run this cell again to go on.")
    if code:
        raise Stopped(f"{name} ended with exit code {code}; its message above says what to do.")


def time_to_read(seconds: float) -> None:
    """Wait before something long begins, so that "Run all" leaves time to read what was said."""
    print(
        f"The training starts in {seconds:.0f} seconds: read the forecast above. The stop button ends it.", flush=True
    )
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        raise Stopped("Nothing was started. Change step 3 or 4, and run on from there.") from None


def flags(**values: object) -> list[object]:
    """The values as flags, without those that are empty or 0."""
    return [word for name, value in values.items() if value for word in (f"--{name}", value)]


# Drive and the text


def colab() -> Any:
    """The package google.colab, None outside Colab."""
    try:
        import google.colab
    except ImportError:
        return None
    return google.colab


def mount_drive(mount_point: str, folder: str) -> Path | None:
    """The folder on Drive that keeps what must outlive this machine; None outside Colab. Nothing may be written before
    Drive is mounted: it cannot be mounted on a folder with files."""
    if colab() is None:
        print("This is not Colab: nothing is mounted, and checkpoints stay in runs/.")
        return None
    from google.colab import drive

    drive.mount(mount_point)
    kept = Path(mount_point) / folder
    if not kept.parent.is_dir():
        raise Stopped(f"There is no folder {kept.parent} on Drive: choose a folder in MyDrive, as MyDrive/gpt2.")
    kept.mkdir(exist_ok=True)
    print(f"Checkpoints are copied to {kept}")
    return kept


def get_text(source: str, path: str, drive: Path | None) -> Path | None:
    """The text to train on: one that was uploaded (kept on Drive, if there is one), or the one at `path`; None for the
    built-in text, which the quickstart's config names."""
    if source == BUILT_IN:
        return None
    if source in (UPLOAD, UPLOAD_ANOTHER):
        text = uploaded(drive or Path("datasets_cache"), is_another=source == UPLOAD_ANOTHER)
    else:
        text = Path(path).expanduser()
        if not path or not text.exists():
            raise Stopped(f"There is no file or folder {path or '(none was named)'}: give the path of your text.")
    if not size_of(text):
        raise Stopped(f"{text} is empty: choose another text.")
    print(f"Text       {text}, {size_of(text):,} bytes")
    return text


def uploaded(kept: Path, is_another: bool) -> Path:
    """The file uploaded last, or one to upload now."""
    folder = kept / "texts"
    there = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if there and not is_another:
        return there[-1]
    if colab() is None:
        raise Stopped("Only Colab uploads. Put your text beside the notebook, and give its path.")
    from google.colab import files

    received = files.upload()  # into the current folder
    if not received:
        raise Stopped("Nothing was uploaded. Run this cell again.")
    folder.mkdir(parents=True, exist_ok=True)
    name = next(iter(received))
    return Path(shutil.move(name, folder / Path(name).name))


def size_of(text: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [text] if text.is_file() else [path for path in text.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def write_prompts(prompts: str, file: Path) -> Path | None:
    """Write a file for --eval_prompts, of prompts with | between them; None if there are none."""
    asked = [prompt.strip() for prompt in prompts.split("|") if prompt.strip()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in asked), encoding="utf-8")
    return file if asked else None


# What is shown, and what leaves the machine


def show(*run_dirs: Path, height: int = 1100) -> None:
    """The page of tools/watch.py in a cell, apart from the notebook around it."""
    from IPython.display import display

    runs = [RunReader(folder, name).read() for folder, name in named(run_dirs).items()]
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe srcdoc="{html.escape(page(runs).decode())}" style="{style}"></iframe>'
    display({"text/html": frame}, raw=True)  # not as HTML, which would ask for the address of a page


def download(out: Path) -> None:
    """Download the exported folder as one file in the browser, and the file for llama.cpp if there is one; outside
    Colab, print where they are."""
    files = [Path(shutil.make_archive(str(out), "zip", out)), out.with_suffix(".gguf")]
    for file in filter(Path.exists, files):
        if colab() is None:
            print(f"{file.resolve()}, {file.stat().st_size:,} bytes")
        else:
            from google.colab import files as browser

            browser.download(str(file))
