"""Extract text by pandoc: Word, OpenDocument, RTF, notebooks, LaTeX, FictionBook, Org, reStructuredText.

Pandoc comes with the package pypandoc_binary. It runs in its sandbox (it opens no other file), under the limits of the
process that starts it.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tokenization.corpus import UnreadableError
from tokenization.encodings import decode

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
# RTF: code page of a document; character set of a font; code page of a character set.
CODE_PAGE, FONT = re.compile(rb"\\ansicpg(\d+)"), re.compile(rb"\\f(\d+)[^;{}]*?\\fcharset(\d+)")
CHARSETS = {128: 932, 129: 949, 134: 936, 136: 950, 161: 1253, 162: 1254, 163: 1258, 177: 1255, 178: 1256}
CHARSETS |= {186: 1257, 204: 1251, 222: 874, 238: 1250}
# RTF: the number of a character with its substitute for old programs (none with `\\uc0`); a font; bytes of text.
TEXT = re.compile(rb"\\u(-?\d+) ?(?:\\'[0-9a-fA-F]{2}|[^\\{}])?|\\f(\d+)|((?:\\'[0-9a-fA-F]{2})+)")
TEXT_UC0 = re.compile(rb"\\u(-?\d+) ?|\\f(\d+)|((?:\\'[0-9a-fA-F]{2})+)")
OLE_SIGNATURE = b"\xd0\xcf\x11\xe0"  # Word files with a password, or from before 2007


def build_reader(suffix: str) -> Callable[[BinaryIO], Iterator[str]]:
    return functools.partial(read_pandoc, FORMATS[suffix])


def read_pandoc(form: str, file: BinaryIO) -> Iterator[str]:
    """Yield a document without notes, comments, pictures and output of code. Tracked changes are accepted."""
    import pypandoc

    content = convert_to_unicode(file.read(), form)
    if content.startswith(OLE_SIGNATURE):
        raise UnreadableError("it has a password, or an older format than its name says; save it again as .docx")
    try:
        program = pypandoc.get_pandoc_path()
    except OSError:
        raise UnreadableError("it needs pandoc (pip install pypandoc_binary)") from None
    options = ["--sandbox", "--from", form, "--to", "plain", "--wrap=none", "--ipynb-output=none"]
    done = subprocess.run([program, *options, f"--lua-filter={FILTER}"], input=content, capture_output=True)
    if done.returncode:
        reason = next(iter(done.stderr.decode(errors="replace").split("\n")), "")
        raise UnreadableError(f"pandoc cannot read it ({reason.strip() or f'exit code {done.returncode}'})"[:500])
    text = done.stdout.decode(errors="replace").replace("\u00ad", "").replace("\u2011", "-")
    yield re.sub(r"\n{3,}", "\n\n", text).strip()


def convert_to_unicode(content: bytes, form: str) -> bytes:
    """Convert a text document to UTF-8. In RTF, write each character by its number, because pandoc reads all bytes as
    windows-1252, and drops a letter after `\\u233?`."""
    if form == "rtf":
        page = CODE_PAGE.search(content)
        default = encoding = f"cp{int(page[1])}" if page else "cp1252"
        fonts = {int(font): f"cp{CHARSETS[int(kind)]}" for font, kind in FONT.findall(content) if int(kind) in CHARSETS}
        has_no_stand_ins = b"\\uc0" in content
        stand_in = " " if has_no_stand_ins else "\\'3f"

        def numbered(match: re.Match[bytes]) -> bytes:
            nonlocal encoding
            number, font, escaped = match.groups()
            if number:
                return f"\\u{int(number)}{stand_in}".encode()
            if font:
                encoding = fonts.get(int(font), default)
                return match[0]
            text = bytes.fromhex(escaped.replace(b"\\'", b"").decode())
            return "".join(f"\\u{ord(each)}{stand_in}" for each in decode_as(text, encoding)).encode()

        return (TEXT_UC0 if has_no_stand_ins else TEXT).sub(numbered, content)
    if form in ("docx", "odt"):
        return content
    declared = XML_DECLARATION.search(content[:200])
    text = decode(content, declared[1].decode() if declared else "")
    return re.sub(r"^\s*<\?xml[^>]*\?>", "", text).encode()


def decode_as(text: bytes, encoding: str) -> str:
    try:
        return text.decode(encoding, "replace")
    except LookupError:
        return text.decode("cp1252", "replace")
