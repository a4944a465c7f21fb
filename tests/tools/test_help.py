"""The menu: every tool, and scripts that start others, answer --help at once and say how they are called."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import ROOT

# What a user types, and what developers do.
TOOLS = ("compare", "export_hf", "import_hf", "serve", "web_demo")
OTHERS = ("benchmarks.gpu", "tests.stress.torture")  # they start processes that measure
CODE = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as end:
        assert not end.code, name
    assert "torch" not in sys.modules, f"{name} imports torch"
"""


def test_help_answers_without_torch() -> None:
    names = [*(f"tools.{name}" for name in TOOLS), *OTHERS]
    done = subprocess.run([sys.executable, "-c", CODE, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"usage: {name.replace('.', '/')}.py" in done.stdout, name


def test_every_tool_has_its_help() -> None:
    assert sorted(path.stem for path in (ROOT / "tools").glob("*.py")) == ["__init__", *TOOLS]
