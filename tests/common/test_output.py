"""Numbers as a person reads them."""

from __future__ import annotations

import math

from common.output import byte_size, clock, si


def test_durations_and_large_numbers_are_readable() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 61, 3600)] == ["0:00", "1:00", "1:01", "1:00:00"]
    assert clock(36_061) == "10:01:01"
    assert [si(number) for number in (3.14159, 1234, 2_500_000, 1.8e11)] == ["3.14", "1.23k", "2.5M", "180G"]
    assert all(math.isfinite(float(si(number).rstrip("kMGT"))) for number in (0, 999.9, 999_999, 1e12))


def test_what_is_small_has_a_size_too() -> None:
    sizes = (0, 36_400, 1_400_000, 999_900_000, 1_615_214_592)
    assert [byte_size(size) for size in sizes] == ["0.0 kB", "36.4 kB", "1.4 MB", "999.9 MB", "1.6 GB"]
