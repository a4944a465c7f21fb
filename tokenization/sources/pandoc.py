"""Extract text by pandoc: Word, OpenDocument, RTF, notebooks, LaTeX, FictionBook, Org, reStructuredText.

Pandoc comes with the package pypandoc_binary. It runs in its sandbox (it opens no other file), under the limits of the
process that starts it.
"""

from __future__ import annotations

import functools
import io
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tokenization.corpus import Source, UnreadableError, read_beside
from tokenization.encodings import decode
from tokenization.sources.archives import open_zip

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
XML_DECLARATION = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)["'][^>]*\?>""")
# RTF: its own code pages, which pandoc does not know; a character's number with its substitute for old programs.
OTHER_PAGE = re.compile(rb"\\ansicpg(?!1252)\d+")
OTHER_FONT = re.compile(rb"\\f(\d+)[^;{}]*?\\fcharset(?![012]\b)\d+")
USED_FONT = re.compile(rb"\\f(\d+)\b(?![^;{}]*\\fcharset)")
NUMBERED = re.compile(rb"\\u(-?\d+) ?(?:\\'[0-9a-fA-F]{2}|[^\\{}])")

DOCUMENT_CLASS = re.compile(rb"^[ \t]*\\documentclass\b", re.M)
MACRO = re.compile(rb"^[ \t]*\\(?:(?:re)?newcommand|providecommand|def|DeclareMathOperator)\b.*", re.M)

RUBY = re.compile(rb"<w:ruby>.*?<w:rubyBase>(.*?)</w:rubyBase>\s*</w:ruby>", re.S)  # furigana; its group is a run


def build_reader(suffix: str) -> Callable[[BinaryIO], Iterator[str]]:
    return functools.partial(_read_pandoc, FORMATS[suffix])


def _read_pandoc(form: str, file: BinaryIO) -> Iterator[str]:
    """Yield a document without notes, comments, pictures and output of code. Tracked changes are accepted."""
    import pypandoc

    content = _convert_to_unicode(file.read(), form)
    try:
        program = pypandoc.get_pandoc_path()
    except OSError:
        raise UnreadableError("it needs pandoc (pip install pypandoc_binary)") from None
    options = ["--sandbox", "--from", form, "--to", "plain", "--wrap=none", "--ipynb-output=none"]
    done = subprocess.run([program, *options, f"--lua-filter={FILTER}"], input=content, capture_output=True)
    if done.returncode:
        reason = next(iter(done.stderr.decode(errors="replace").split("\n")), "")
        raise UnreadableError(f"pandoc cannot read it ({reason.strip() or f'exit code {done.returncode}'})"[:500])
    text = done.stdout.decode(errors="replace").replace("\u2011", "-")
    yield re.sub(r"\n{3,}", "\n\n", text).strip()


def find_macros(source: Source) -> bytes:
    """Return the commands that the main file of a LaTeX project, beside or above a part of it, defines on one line."""
    if source.member is not None or DOCUMENT_CLASS.search(read_beside(source, source.path.name)):
        return b""
    folder = source.path.parent
    beside = (path.read_bytes() for path in (*sorted(folder.glob("*.tex")), *sorted(folder.parent.glob("*.tex"))))
    lines = [line for content in beside if DOCUMENT_CLASS.search(content) for line in MACRO.findall(content)]
    return b"".join(line + b"\n" for line in lines if line.count(b"{") == line.count(b"}"))


def _convert_to_unicode(content: bytes, form: str) -> bytes:
    """Convert a text document to UTF-8. Raises UnreadableError for an RTF with letters in another code page than
    windows-1252, as which pandoc reads all bytes."""
    if form == "rtf":
        # Pandoc drops a letter after `\u233?`.
        numbered = content if b"\\uc0" in content else NUMBERED.sub(rb"\\u\1\\'3f", content)
        is_other = OTHER_PAGE.search(content) or set(OTHER_FONT.findall(content)) & set(USED_FONT.findall(content))
        if is_other and re.search(rb"\\'(?!3f)[0-9a-fA-F]{2}", numbered):
            raise UnreadableError("its letters are in an old code page; save it again as .docx")
        return numbered
    if form in ("docx", "odt"):
        return _remove_readings(content) if b"word/document.xml" in content else content
    declared = XML_DECLARATION.search(content[:200])
    text = decode(content, declared[1].decode() if declared else "")
    return re.sub(r"^\s*<\?xml[^>]*\?>", "", text).encode()


def _remove_readings(content: bytes) -> bytes:
    """Return a Word file without furigana, because pandoc drops the words under them."""
    buffer = io.BytesIO()
    with open_zip(io.BytesIO(content)) as archive, zipfile.ZipFile(buffer, "w") as without:
        for info in archive.infolist():
            without.writestr(info, RUBY.sub(rb"</w:r>\1<w:r>", archive.read(info)))
    return buffer.getvalue()
