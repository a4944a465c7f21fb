"""Whether what a page says can be read: the contrast of its texts with what is behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LEAST = 4.5  # WCAG 2, success criterion 1.4.3
SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def assert_readable(page: Any, least_texts: int) -> None:
    """`page` is one of Playwright's, or a frame of one."""
    texts = page.evaluate(SCRIPT)
    assert len(texts) >= least_texts, texts
    faint = sorted({(round(ratio, 2), text, element) for ratio, text, element in texts if ratio < LEAST})
    assert not faint, "\n".join(map(str, faint))
