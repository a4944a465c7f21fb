"""Text of documents that pandoc reads: Word, OpenDocument, RTF, notebooks, LaTeX, FictionBook, Org, reStructuredText.

Pandoc comes with the package pypandoc_binary. It runs as a program of its own, in its sandbox (it opens no other file),
and under the limits of the process that starts it.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tokenization.corpus import Unreadable

FORMATS = {
    ".docx": "docx",
    ".odt": "odt",
    ".rtf": "rtf",
    ".ipynb": "ipynb",
    ".tex": "latex",
    ".fb2": "fb2",
    ".org": "org",
    ".rst": "rst",
}
FILTER = Path(__file__).with_name("plain.lua")
OLE = b"\xd0\xcf\x11\xe0"  # how a Word file with a password begins, and one of before 2007


def reader_of(suffix: str) -> Callable[[BinaryIO], Iterator[str]]:
    return functools.partial(pandoc_documents, FORMATS[suffix])


def pandoc_documents(form: str, file: BinaryIO) -> Iterator[str]:
    """A document, without notes, comments, pictures and the output of code; changes that were tracked are accepted."""
    import pypandoc

    content = file.read()
    if content.startswith(OLE):
        raise Unreadable("it has a password, or is older than its name says: save it again as .docx")
    try:
        program = pypandoc.get_pandoc_path()
    except OSError:
        raise Unreadable("it needs pandoc: pip install pypandoc_binary") from None
    options = ["--sandbox", "--from", form, "--to", "plain", "--wrap=none", "--ipynb-output=none"]
    done = subprocess.run([program, *options, f"--lua-filter={FILTER}"], input=content, capture_output=True)
    if done.returncode:
        reason = next(iter(done.stderr.decode(errors="replace").split("\n")), "")
        raise Unreadable(f"pandoc cannot read it ({reason.strip() or f'exit code {done.returncode}'})"[:500])
    text = done.stdout.decode(errors="replace").replace("\u00ad", "").replace("\u2011", "-")
    yield re.sub(r"\n{3,}", "\n\n", text).strip()
