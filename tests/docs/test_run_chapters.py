"""The pages of docs/how_it_works/ show what their Python prints, and what they would show otherwise is noticed."""

from __future__ import annotations

import re

import pytest

from tests.docs.run_chapters import FOLDER, main, read_pages


def test_every_block_of_the_pages_is_what_the_code_above_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().err
    assert re.fullmatch(r"7 pages, \d+ blocks", capsys.readouterr().out.splitlines()[-1])


def test_the_contents_name_every_chapter_and_each_leads_to_the_next() -> None:
    names = [path.name for path in read_pages()]
    assert re.findall(r"^\| \[[^]]+\]\((\d_\w+\.md)\)", (FOLDER / "README.md").read_text(), re.MULTILINE) == names
    for page, following in zip(names, [*names[1:], "README.md"], strict=True):
        assert f"]({following})" in (FOLDER / page).read_text().splitlines()[-1]


PAGE = """Two blocks.

```python
x = 6 * 7
```

```python
print(x, open("left.txt", "w").write("here"))
```

```text
41 4
```
"""
