"""The functions that the cells of notebooks/train_in_colab.ipynb call. Each can be called again, and continues.

The scripts run inside the kernel: Colab kills a command started with ! half a second after its stop button is pressed,
and saving a large model takes longer.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import generate
import tokenize_local_bpe
import tools.export_hf
import train_colab_mmap
from common.checkpoint import Checkpoint, open_checkpoint, step_folders
from common.errors import INTERRUPTED, CheckpointError, UserError
from common.output import byte_size
from common.script import Script
from common.validation import build
from examples import conversations
from exchange import gguf_export
from generation.completion import prompt_ids
from generation.sampling import Sampling
from generation.terminal import Conversation, room_for_prompt, stream_one
from model import TransformerLanguageModel
from notebooks.notebook_view import LiveView, Tables, Until, framed
from serving.run_reader import RunReader
from serving.watch_page import named, page
from tokenization.metadata import TokenMetadata, metadata_files
from tokenizer import Tokenizer
from training.checkpoints.state import read_state
from training.config import parse_config
from training.machine.hardware import detect_hardware

# Of a text of at most so many bytes, as docs/choosing.md advises; and of more.
SIZES = ((10e6, "small_modern"), (30e6, "medium_modern"), (300e6, "large"))
LARGEST = "gpt2_small"
WITHOUT_A_GPU = "small_modern"
QUICKSTART = "quickstart"
BUILT_IN, UPLOAD, UPLOAD_ANOTHER = "built-in", "upload", "upload another"


class Stopped(Exception):
    """Ends a cell, and the cells after it, with a sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:  # the name by which IPython asks
        return [str(self)]


def run(name: str, main: Script, *words: object) -> None:
    """Run a script, after printing the command that does the same in a terminal. Raises Stopped if it fails."""
    argv = [str(word) for word in words]
    print(f"$ python {name} {shlex.join(argv)}\n", flush=True)
    code = main(argv)
    if code == INTERRUPTED:
        raise Stopped("Stopped. The progress is kept: run this cell again to go on.")
    if code:
        raise Stopped(f"{name} ended with exit code {code}; its message above says what to do.")


def describe_machine() -> None:
    """Print this machine's device and memory."""
    config = parse_config([])
    hardware = detect_hardware(config, config)
    print(f"Device     {hardware.name}")
    if hardware.memory_bytes:
        print(f"Memory     {byte_size(hardware.memory_bytes)}")
    if not torch.cuda.is_available():
        print("There is no GPU here. In Colab: Runtime > Change runtime type. The built-in text needs none.")


def choose_config(asked: str, text: Path, source: str) -> str:
    """`asked`; for "auto" the config that suits the text and the machine. Raises Stopped for the quickstart's config
    with another text, which its questions are not about."""
    if asked == QUICKSTART and source != BUILT_IN:
        raise Stopped(f"{QUICKSTART} is for the built-in text: choose auto, or small_modern for a first try.")
    if asked != "auto":
        chosen = asked
    elif source == BUILT_IN:
        chosen = QUICKSTART
    elif not torch.cuda.is_available():
        chosen = WITHOUT_A_GPU
    else:
        chosen = next((name for most, name in SIZES if size_of(text) <= most), LARGEST)
    print(f"Config     configs/{chosen}.json")
    return chosen


def size_of(text: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [text] if text.is_file() else [path for path in text.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


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


def get_text(source: str, path: str, drive: Path | None) -> Path:
    """The text to train on: the built-in one, an uploaded one (kept on Drive, if there is one), or the one at
    `path`."""
    if source == BUILT_IN:
        text = Path("datasets_cache") / "conversations" / "conversations.txt"  # where the trainer looks for it, too
        if not text.exists():
            text.parent.mkdir(parents=True, exist_ok=True)
            conversations.write(text)
    elif source in (UPLOAD, UPLOAD_ANOTHER):
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


# The scripts


def tokenize(text: Path, tokens: Path, vocab_size: int, config: str, run_dir: Path, drive: Path | None) -> None:
    """Tokenize the text into the folder `tokens`: with the vocabulary of the run to continue, if there is one here or
    on Drive; else with one of `vocab_size` (0: as in the config). Raises Stopped if that run was trained on another
    text."""
    kept = newest_of(run_dir, drive)
    if kept:
        vocabulary: list[object] = ["--tokenizer_file", kept.tokenizer_path()]
    else:
        vocabulary = ["--vocab_size", vocab_size or parse_config(["--config", config]).vocab_size]
    words = ["--input", text, "--output_dir", tokens, *vocabulary]
    with Until("Train on it:") as output, contextlib.redirect_stdout(output):
        run("tokenize_local_bpe.py", tokenize_local_bpe.main, *words)
    trained_on = read_state(kept).data.get("tokens_sha256") if kept else None
    if trained_on not in (None, *(TokenMetadata.read(path).tokens_sha256 for path in metadata_files(tokens))):
        raise Stopped(
            f"{run_dir} was trained on another text than {text}. In step 4 give this training a run_name of its own, "
            "or choose the other text."
        )


def newest_of(run_dir: Path, drive: Path | None) -> Checkpoint | None:
    """A run's newest complete checkpoint, here or among the copies on Drive."""
    copies = [mirror_of(drive) / run_dir.name] if drive else []
    for folder in step_folders(run_dir / "checkpoints", *copies):
        with contextlib.suppress(UserError, OSError):
            checkpoint = open_checkpoint(folder)
            read_state(checkpoint)
            return checkpoint
    return None


def mirror_of(drive: Path) -> Path:
    return drive / "checkpoints"


def training_flags(
    config: str, tokens: Path, run_dir: Path, drive: Path | None, more: str = "", prompts: str = "", **values: float
) -> list[str]:
    """The trainer's command line. `values` of 0 are left out: the config decides. `more`: flags as typed. `prompts`,
    separated by |, are written to a file beside the tokens. The quickstart has its own length, evaluations and prompts.
    max_steps replaces epochs."""
    words: list[object] = ["--config", f"{config}.json", "--data_dir", tokens, "--output_dir", run_dir]
    if config == QUICKSTART:  # its config names a text, which is already tokenized with the chosen vocabulary
        for file in metadata_files(tokens):
            words += ["--vocab_size", TokenMetadata.read(file).vocab_size]
    if drive:
        words += ["--checkpoint_dir", mirror_of(drive)]
    asked = [prompt.strip() for prompt in prompts.split("|") if prompt.strip()]
    if asked and config != QUICKSTART:
        listed = tokens / "sample_prompts.jsonl"
        tokens.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in asked), encoding="utf-8")
        words += ["--eval_prompts", listed]
    left_out = {"epochs"} if values.get("max_steps") else set()
    left_out |= {"epochs", "eval_interval"} if config == QUICKSTART else set()
    for key, value in values.items():
        words += [f"--{key}", f"{value:g}"] if value and key not in left_out else []
    return [str(word) for word in [*words, *shlex.split(more)]]


def try_out(flags: Sequence[str]) -> None:
    """A dry run: everything that a training does, once, without writing a run."""
    forget_model()
    run("train_colab_mmap.py", train_colab_mmap.main, *flags, "--dry_run")


def train(flags: Sequence[str], run_dir: Path) -> None:
    """Start or continue the training, showing the loss and the newest answers. Pressing the stop button once saves."""
    forget_model()
    with LiveView(run_dir) as view, contextlib.redirect_stdout(view):
        run("train_colab_mmap.py", train_colab_mmap.main, *flags)


def show(*run_dirs: Path) -> None:
    """The page of tools/watch.py in a cell."""
    runs = [RunReader(folder, name).read() for folder, name in named(run_dirs).items()]
    framed(page(runs).decode(), height=1100)


# The model


class Loaded:
    """The model used last, kept for the next call, and its conversation."""

    def __init__(self, path: Path):
        checkpoint = open_checkpoint(path)
        self.path = checkpoint.path
        self.model: TransformerLanguageModel
        self.tokenizer: Tokenizer
        self.model, self.tokenizer = generate.load_checkpoint(checkpoint, "auto")
        self.template = checkpoint.chat_template()
        self.conversation: Conversation | None = None


LOADED: Loaded | None = None


def forget_model() -> None:
    """Free its memory for the training."""
    global LOADED
    LOADED = None


def talk(prompt: str, checkpoint: Path, is_new: bool = True, **sampling: Any) -> None:
    """Stream the model's continuation of the prompt. A model of conversations answers, and remembers the turns before
    unless the conversation `is_new`. The stop button ends the text where it is."""
    global LOADED
    try:
        settings = build(Sampling, sampling)
        if LOADED is None or LOADED.path != open_checkpoint(checkpoint).path:
            LOADED = Loaded(checkpoint)
        loaded = LOADED
        with contextlib.suppress(KeyboardInterrupt):
            if loaded.template is None:
                print(prompt, end="", flush=True)
                stream_one(
                    loaded.model, loaded.tokenizer, prompt_ids(loaded.tokenizer, prompt), settings, is_answer=False
                )
                return
            room = room_for_prompt(loaded.model, settings)
            if is_new or loaded.conversation is None:
                loaded.conversation = Conversation(loaded.template, loaded.tokenizer, room)
            loaded.conversation.room = room
            print(f"> {prompt}")
            asked = loaded.conversation.ask(prompt)
            answer = stream_one(loaded.model, loaded.tokenizer, asked, settings, is_answer=True)
            loaded.conversation.answered(answer.text)
    except (UserError, ValueError) as problem:  # wrong settings, or unknown characters
        raise Stopped(str(problem)) from None


def score(passage: str, checkpoint: Path) -> None:
    """Print how well the model predicts a file, or the passage itself."""
    text = Path(passage)
    if len(passage) > 255 or not text.is_file():  # no file name is longer
        text = Path("datasets_cache") / "passage.txt"
        text.parent.mkdir(exist_ok=True)
        text.write_text(passage, encoding="utf-8")
    with Tables() as output, contextlib.redirect_stdout(output):
        run("generate.py", generate.main, "--score", text, "--checkpoint", checkpoint)


# What leaves the machine


def export(checkpoint: Path, gguf: bool) -> Path:
    """Export the newest checkpoint as a folder for transformers, and with `gguf` as a file for llama.cpp beside it;
    each once. If there can be no such file, print why. Raises Stopped if there is no checkpoint."""
    try:
        newest = open_checkpoint(checkpoint)
    except CheckpointError as problem:
        raise Stopped(str(problem)) from None
    out = Path("exported") / f"{checkpoint.name}_{newest.path.name}"
    file = out.with_suffix(".gguf")
    if out.exists():
        print(f"{out} is there already.")
    else:
        out.parent.mkdir(exist_ok=True)
        run("tools/export_hf.py", tools.export_hf.main, newest.path, out)
    if gguf and not file.exists():
        try:
            gguf_export.export_file(newest.path, file)
        except UserError as problem:
            print(f"\nThere is no {file}. {problem}")
    return out


def download(out: Path) -> None:
    """Download the exported folder as one file in the browser; outside Colab, print where that file is."""
    files = [Path(shutil.make_archive(str(out), "zip", out)), out.with_suffix(".gguf")]
    for file in filter(Path.exists, files):
        if colab() is None:
            print(f"{file.resolve()}, {file.stat().st_size:,} bytes")
        else:
            from google.colab import files as browser

            browser.download(str(file))
