"""What a cell shows of a training: its newest line, the loss so far and the newest answers, in place."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import re
import sys
from pathlib import Path

from common.output import shortened
from training.reports.records import CURVE, read_samples, score

PROGRESS = re.compile(r"step [\d,]+/[\d,]+, ")


class Live(io.TextIOBase):
    """Stands in for stdout. Progress lines are shown in place of each other, with the chart and the newest answers; all
    others as they come, but for the table of answers at the end, which stands there already.

    A view that fails must not stop the training.
    """

    def __init__(self, run_dir: Path):
        from IPython.display import HTML, display

        self.run_dir, self.out, self.pending = run_dir, sys.stdout, ""
        self.handle = display(HTML(""), display_id=True)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            if PROGRESS.match(line):
                self.refresh(line)
            elif not line.startswith("| "):
                self.out.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        self.out.flush()

    def close(self) -> None:
        if not self.closed:
            self.out.write(self.pending)
            self.refresh("")
        super().close()

    def refresh(self, status: str) -> None:
        from IPython.display import HTML

        if self.handle is None:
            return
        try:
            self.handle.update(HTML(shown(self.run_dir, status)))
        except Exception as problem:  # of a file, of the connection to the notebook
            self.handle = None
            self.out.write(f"The chart is not shown any more: {problem}\n")


def shown(run_dir: Path, status: str) -> str:
    """The HTML of a run: the status, the curve that the training drew last, and the answers of its last evaluation."""
    parts = [f"<pre>{html.escape(status)}</pre>"]
    with contextlib.suppress(OSError):  # there is none yet
        image = base64.b64encode((run_dir / CURVE).read_bytes()).decode()
        parts.append(f'<img src="data:image/png;base64,{image}" width="640" alt="The loss by step">')
    for sample in read_samples(run_dir)[-1:]:
        right = f", {score(sample)} exactly right" if sample.judged else ""
        parts.append(f"<div>After step {sample.step:,}{right}:</div><table><tr><th>prompt<th>answer<th>expected")
        for row in zip(sample.prompts, sample.answers, sample.expected, strict=True):
            cells = (html.escape(shortened(text or "", 150)) for text in row)
            parts.append("<tr>" + "".join(f"<td style='text-align: left'>{text}" for text in cells))
        parts.append("</table>")
    return "".join(parts)
