from __future__ import annotations

import pytest

from persistkv_tools.render import format_size


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
def test_format_size_returns_number_with_binary_unit(num_bytes, text):
    assert format_size(num_bytes) == text
