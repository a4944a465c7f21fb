"""Hardware detection from the machine's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import machine

TOTAL, AVAILABLE = 32_000_000 * 1024, 20_000_000 * 1024


@pytest.mark.parametrize("version", [0, 1], ids=["v2", "v1"])
@pytest.mark.parametrize(
    ("limit", "used", "total", "available"),
    [
        ("8000000000", "3000000000", 8_000_000_000, 5_000_000_000),
        ("8000000000", "9000000000", 8_000_000_000, 0),
        ("9223372036854771712", "3000000000", TOTAL, AVAILABLE),  # what v1 says where there is no limit
        ("max", "3000000000", TOTAL, AVAILABLE),
    ],
)
def test_memory_is_that_of_the_container(
    version: int, limit: str, used: str, total: int, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("limit", "used")]
    for path, content in zip(files, (limit, used), strict=True):
        path.write_text(content + "\n")
    absent = (str(tmp_path / "absent"), str(tmp_path / "absent"))
    pairs = [absent, absent]
    pairs[version] = (str(files[0]), str(files[1]))
    monkeypatch.setattr(machine, "CGROUP_MEMORY", tuple(pairs))
    monkeypatch.setattr(machine, "memory_info", {"MemTotal": TOTAL, "MemAvailable": AVAILABLE}.get)
    assert (machine.total_ram(), machine.available_ram()) == (total, available)
