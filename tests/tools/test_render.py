from __future__ import annotations

import pytest

from persistkv_tools.render import format_expiry, format_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (13_207_024_435, "12.3 GiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_format_size_returns_number_with_binary_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7 * 86_400 - 2, "in 7d"),
        (6.4 * 86_400, "in 6d"),
        (86_399, "in 1d"),
        (13 * 3600, "in 13h"),
        (3599, "in 1h"),
        (89, "in 1m"),
        (30.2, "in 31s"),
        (0, "expired"),
    ],
)
def test_format_expiry_is_rounded_to_nearest_unit(seconds: float, text: str) -> None:
    assert format_expiry(1e9 + seconds, now=1e9) == text
