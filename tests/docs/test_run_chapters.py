"""The pages of docs/how_it_works/ show what their Python prints, and what they would show otherwise is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tests.docs.run_chapters
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


def test_a_page_that_is_not_true_is_told_and_can_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tests.docs.run_chapters, "FOLDER", tmp_path)
    page = tmp_path / "1_numbers.md"
    page.write_text(PAGE)
    (tmp_path / "2_files.md").write_text('```python\nprint(open("left.txt").read())\n```\n\n```text\nhere\n```\n')
    assert main([]) == 3
    said = capsys.readouterr().err
    assert f"{page}, line 7" in said and "42 4" in said and "41 4" in said and "2_files" not in said
    assert page.read_text() == PAGE
    assert main(["--write"]) == 0 and page.read_text() == PAGE.replace("41", "42")
    assert main([]) == 0
    assert not Path("left.txt").exists()
