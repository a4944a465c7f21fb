"""The page of tools/export_page.py in Chromium: its size, its speed, and whether it answers as generate.py does.

    python benchmarks/page.py
    python benchmarks/page.py --checkpoint runs/quickstart

Without a checkpoint it measures a model of random weights, with 20 million parameters in the shape of
medium_modern.json. With one it also asks the quickstart's 65 questions. Needs playwright and Chromium.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, markdown_table
from common.errors import ConfigError, script
from common.flags import Parser, add_debug

VOCABULARY = 12_288  # with it, medium_modern.json makes 20 million parameters
TYPES = ("int8", "f16")
PROMPT = "What is the capital of France? " * 5
NEW_TOKENS = 200
LONGEST_ANSWER = 60  # tokens; about three times the longest


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/page.py", description="Measure the page of tools/export_page.py in Chromium.")
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint or run folder [random, 20 million parameters]")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="texts, of which the fastest counts [5]")
    parser.add_argument("--toy", action="store_true", help="a tiny model: to try the benchmark itself")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        raise ConfigError("--rounds must be at least 1.")
    rows = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        checkpoint = arguments.checkpoint or str(write_random(Path(folder) / "random", arguments.toy))
        asked = questions(checkpoint) if arguments.checkpoint else {}
        for kind in TYPES:
            page = export(checkpoint, Path(folder) / f"{kind}.html", kind)
            rows.append([kind, f"{page.stat().st_size / 1e6:.2f}", *measure(browser, page, arguments.rounds, asked)])
        print(f"\nChromium {browser.version}\n")
    headings = ("weights", "MB", "ready after, s", "155 letters read in, s", "tokens/s", "answers as generate.py's")
    print(markdown_table(headings, rows))
    return 0


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        raise ConfigError("This needs Chromium (Debian: apt-get install chromium) and `pip install playwright`.")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def write_random(folder: Path, toy: bool) -> Path:
    """A checkpoint of random weights, with a vocabulary learned from made-up words."""
    import torch

    from benchmarks.tokenizing import generated_text
    from common.checkpoint import stored_config, stored_weights, take_snapshot, write_checkpoint
    from model import TransformerLanguageModel
    from model_config import ModelConfig
    from tokenizer_bpe import BPETokenizer

    tokenizer = BPETokenizer.train([generated_text(0.03 if toy else 6)], 300 if toy else VOCABULARY)
    shape, _ = ModelConfig.from_dict(
        json.loads((ROOT / "configs" / "medium_modern.json").read_text(encoding="utf-8"))
        | {"vocab_size": tokenizer.vocab_size}
        | ({"num_layers": 1, "embed_dim": 64, "num_heads": 2, "max_seq_len": 64} if toy else {})
    )
    torch.manual_seed(0)
    model = TransformerLanguageModel(shape)
    model.head.weight.data.normal_(std=0.2)  # about as uncertain as a trained model
    config = stored_config(model, tokenizer.kind)
    snapshot = take_snapshot(stored_weights(model), {}, tokenizer.to_json().encode(), config, {})
    write_checkpoint(folder, snapshot)
    return folder


def questions(checkpoint: str) -> dict[str, str]:
    """The quickstart's questions, and the greedy answer of generate.py to each."""
    from examples.conversations import HELD_OUT_FILE
    from generation.decoding import generate
    from generation.loading import load_model
    from generation.settings import Sampling

    lines = HELD_OUT_FILE.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    sampling = Sampling(max_new_tokens=LONGEST_ANSWER, temperature=0)
    answers = generate(*load_model(checkpoint), prompts, sampling)
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


def export(checkpoint: str, page: Path, kind: str) -> Path:
    """By the tool, as its user does."""
    tool = str(ROOT / "tools" / "export_page.py")
    command = [sys.executable, tool, checkpoint, str(page), "--type", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{checkpoint} could not be exported: {done.stderr.strip()}")
    print(done.stdout.splitlines()[0])
    return page


def measure(browser: Any, page: Path, rounds: int, asked: dict[str, str]) -> list[str]:
    """Cells of a row: seconds until the page is ready and until it has read a prompt, tokens/s, equal answers."""
    tab = browser.new_page()
    tab.set_default_timeout(120_000)
    started = time.perf_counter()
    tab.goto(page.as_uri())
    tab.locator("#go:enabled").wait_for()
    ready = time.perf_counter() - started
    reading, speeds = [], []
    for i in range(rounds):
        # Another beginning each time: the page does not read again what it has in its cache.
        started = time.perf_counter()
        write(tab, f"{i} {PROMPT}", 1, temperature=0)
        reading.append(time.perf_counter() - started)
        write(tab, PROMPT, NEW_TOKENS, temperature=0.8)
        note = tab.locator(".note").inner_text()
        speeds.append(int(note.split(" tokens/s")[0].split()[-1]))
    equal = sum(write(tab, prompt, LONGEST_ANSWER, temperature=0) == answer for prompt, answer in asked.items())
    tab.close()
    return [f"{ready:.1f}", f"{min(reading):.2f}", str(max(speeds)), f"{equal} of {len(asked)}" if asked else ""]


def write(tab: Any, prompt: str, length: int, temperature: float) -> str:
    """The page's continuation of the prompt."""
    settings = "([length, heat]) => ((byId('length').value = length), (byId('temperature').value = heat))"
    tab.evaluate(settings, [length, temperature])
    tab.locator("#text").fill(prompt)
    tab.locator("#go").click()
    tab.locator("#go:enabled").wait_for()
    return str(tab.locator(".turn.model").text_content())


if __name__ == "__main__":
    sys.exit(main())
