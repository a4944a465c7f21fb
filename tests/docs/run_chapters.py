"""Run the Python of the chapters in docs/how_it_works/, and compare what it prints with the output in the page.

    python tests/docs/run_chapters.py            # are the pages right, on this machine?
    python tests/docs/run_chapters.py --write    # update them

Each page runs by itself, but all share one temporary folder and the files in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import DataError
from common.files import atomic_write
from common.flags import Parser
from common.script import script
from training.config import REPOSITORY

FOLDER = REPOSITORY / "docs" / "how_it_works"
# Python, and its output below it, if any.
BLOCK = re.compile(r"(^```python\n(?P<code>.*?)^```\n)(?P<shown>\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
END = "-- the end of a block --"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
LAST_DIGITS = 3  # how many units of its last digit a decimal number may differ between machines


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Raises DataError listing the differences."""
    arguments = parse_arguments(argv)
    pages = read_pages()
    now = run(pages)
    differing = [problem for path, text in pages.items() for problem in differences(path, text, now[path])]
    if arguments.write:
        for path, text in now.items():
            if any(differences(path, pages[path], text)):  # not for rounding alone
                with atomic_write(path) as file:
                    file.write(text.encode())
                print(f"Wrote {path}")
    elif differing:
        raise DataError("\n".join([*differing, "If that is right: python tests/docs/run_chapters.py --write"]))
    print(f"{len(pages)} pages, {sum(len(BLOCK.findall(text)) for text in pages.values())} blocks")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="tests/docs/run_chapters.py", description="Run the Python of docs/how_it_works/, compare its output."
    )
    parser.add_argument("--write", action="store_true", help="write the current output into the pages")
    return parser.parse_args(argv)


def read_pages() -> dict[Path, str]:
    """The chapters in order."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("[0-9]*.md"))}


def run(pages: dict[Path, str]) -> dict[Path, str]:
    """The pages with the current output of their Python."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return {path: run_page(path.stem, text) for path, text in pages.items()}


def run_page(name: str, text: str) -> str:
    """A page with the current output of its Python, run as a script in the current folder."""
    code = ""
    for block in BLOCK.finditer(text):
        code += "\n" * (line_of(block) - code.count("\n"))  # so that tracebacks have the line numbers of the page
        code += f"{block['code']}print({END!r})\n"
    script = Path(f"{name}.py")
    script.write_text(code, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name=name)
    outputs = iter(printed.getvalue().split(f"{END}\n"))

    def as_it_is_now(block: re.Match[str]) -> str:
        output = next(outputs)
        return block[1] + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(as_it_is_now, text)


def line_of(block: re.Match[str]) -> int:
    return block.string.count("\n", 0, block.start()) + 1


def differences(path: Path, before: str, after: str) -> list[str]:
    """A message for each block whose output differs by more than rounding."""
    blocks = zip(BLOCK.finditer(before), BLOCK.finditer(after), strict=True)
    return [
        f"{path}, line {line_of(old)}, prints:{new['shown']}but the page has:{old['shown']}"
        for old, new in blocks
        if not agree(old["shown"] or "", new["shown"] or "")
    ]


def agree(shown: str, printed: str) -> bool:
    """Whether two outputs agree: words and whole numbers exactly, decimal numbers up to the last digit, and any amount
    of white space."""
    words = [re.sub(r"\s+", " ", NUMBER.sub("0", text)) for text in (shown, printed)]
    numbers = [NUMBER.findall(text) for text in (shown, printed)]
    return words[0] == words[1] and all(near(*pair) for pair in zip(*numbers, strict=True))


def near(shown: str, printed: str) -> bool:
    digits = len(shown.partition(".")[2])
    if not digits or "e" in shown + printed:
        return shown == printed
    return abs(float(shown) - float(printed)) <= (LAST_DIGITS + 0.5) * 10**-digits


if __name__ == "__main__":
    sys.exit(main())
