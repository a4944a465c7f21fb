"""Files of each kind that the pre-tokenizer reads, as small as they can be."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence

CONTAINER = """<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">
<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""


def archive(members: Mapping[str, str | bytes]) -> bytes:
    """The same bytes at any time: names of tests are made of them."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        for name, content in members.items():
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return target.getvalue()


def epub(
    chapters: Sequence[str],
    spine: Sequence[int] | None = None,
    parts: Mapping[str, str | bytes] | None = None,
    without: Sequence[str] = (),
) -> bytes:
    """The chapters are bodies of XHTML; the spine says their order. `parts` are added, or replace others."""
    order = range(len(chapters)) if spine is None else spine
    items = "".join(f'<item id="c{i}" href="part%20{i}.xhtml"/>' for i in range(len(chapters)))
    refs = "".join(f'<itemref idref="c{i}"/>' for i in order)
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{refs}</spine></package>'
    )
    pages = {
        f"OEBPS/part {i}.xhtml": f"<html><head><title>no</title></head><body>{body}</body></html>"
        for i, body in enumerate(chapters)
    }
    members = {"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package, **pages, **(parts or {})}
    return archive({name: content for name, content in members.items() if name not in without})


def docx(paragraphs: Sequence[str]) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    of_office = "http://schemas.openxmlformats.org"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    types = f'<Override PartName="/word/document.xml" ContentType="{kind}"/>'
    main = f'Id="a" Type="{of_office}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"'
    packages, words = f"{of_office}/package/2006", f"{of_office}/wordprocessingml/2006/main"
    return archive(
        {
            "[Content_Types].xml": f'<Types xmlns="{packages}/content-types">{types}</Types>',
            "_rels/.rels": f'<Relationships xmlns="{packages}/relationships"><Relationship {main}/></Relationships>',
            "word/document.xml": f'<w:document xmlns:w="{words}"><w:body>{body}</w:body></w:document>',
        }
    )


def pdf(pages: Sequence[Sequence[str]]) -> bytes:
    """Each page is a list of lines; a tab goes to a right column."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    kids = []
    for lines in pages:
        lefts = [6 * (len(line) - len(line.lstrip())) for line in lines]  # a space indents by 6 points
        moves = [left - before for before, left in zip([0, *lefts], lefts, strict=False)]
        shown = " ".join(f"{move} -14 Td ({line.strip()}) Tj" for move, line in zip(moves, lines, strict=True))
        shown = re.sub(r"\t([^)]*)\) Tj", r") Tj 260 0 Td (\1) Tj -260 0 Td", shown)
        stream = f"BT /F1 12 Tf 14 TL 72 720 Td {shown} ET" if lines else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        resources = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {resources} "
            f"/Contents {len(objects)} 0 R >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    content, offsets = "%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        offsets.append(len(content))
        content += f"{number} 0 obj\n{text}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    content += (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    start = content.index("xref")
    return f"{content}startxref\n{start}\n%%EOF".encode("latin-1")
