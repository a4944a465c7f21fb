"""The ranges of requirements*.txt include the versions of constraints*.txt."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import Specifier
from packaging.version import Version

import common
from tests.end_to_end.commands import SCRIPTS
from tests.helpers import ROOT

ASKED = ("requirements.txt", ".ci/requirements-dev.txt", "requirements-files.txt", "requirements-extras.txt")


def read(name: str) -> dict[str, Specifier]:
    """Return each package's bound or version in a file."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-r ")]
    return {requirement.name: Specifier(str(requirement.specifier)) for requirement in found}


@pytest.mark.parametrize("constraints", ["constraints.txt", ".ci/constraints-colab.txt", ".ci/constraints-oldest.txt"])
def test_no_version_is_one_that_is_not_allowed(constraints: str) -> None:
    named = read(constraints)
    for name in ASKED:
        for package, asked in read(name).items():
            assert package not in named or asked.contains(named[package].version), (name, package)


def test_the_tests_run_with_known_versions_of_everything() -> None:
    named = read("constraints.txt")
    assert set().union(*map(read, ASKED)) == set(named)
    assert all(version.operator == "==" for version in named.values())


def test_a_missing_package_is_one_sentence_with_what_to_type() -> None:
    """As when the environment is not activated. Every script imports `common` first."""
    assert set(common.PACKAGES) == read("requirements.txt").keys()
    code = (
        "import sys; sys.path[:] = [sys.argv[1], *(p for p in sys.path if 'site-packages' not in p)]; import generate"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "activate" in done.stderr and "pip install -r" in done.stderr


def test_the_oldest_are_the_lower_bounds() -> None:
    oldest = read(".ci/constraints-oldest.txt")
    for package, asked in read("requirements.txt").items():
        assert asked.operator == ">=" and Version(oldest[package].version) == Version(asked.version), package


def test_every_script_prints_the_version_of_the_changelog(capsys: pytest.CaptureFixture[str]) -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == common.__version__
    for script in SCRIPTS.values():
        with pytest.raises(SystemExit) as end:
            script(["--version"])
        assert not end.value.code and capsys.readouterr().out.split()[-1] == common.__version__


def test_an_editable_install_has_every_folder_and_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["tool"]["setuptools"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "tools", "benchmarks", "notebooks"}
    assert {name.removesuffix("*") for name in asked["packages"]["find"]["include"]} == folders
    assert {f"{name}.py" for name in asked["py-modules"]} == {path.name for path in ROOT.glob("*.py")}
