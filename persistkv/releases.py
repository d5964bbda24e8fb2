"""Releases of other packages that persistkv is tested with, and the check of the installed ones."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple


class Tested(NamedTuple):
    """Range of releases of a package. The tests run with the oldest and the newest one."""

    oldest: str
    newest: str

    def covers(self, release: str) -> bool:
        """Return whether a release is in the range. A patch release of the newest one, such as
        2.4.6 of 2.4, is in the range."""
        numbers = _numbers(release)
        if numbers < _numbers(self.oldest):
            return False
        # compare as many numbers as the newest one has, because more are those of a patch release
        newest = _numbers(self.newest)
        return numbers[: len(newest)] <= newest

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return self.newest
        return f"{self.oldest} to {self.newest}"


TESTED = MappingProxyType(
    {
        "lmdb": Tested("3.0", "3.0"),
        "msgspec": Tested("0.21", "0.22"),
        "numpy": Tested("1.26", "2.4"),
        "rich": Tested("14.3", "15.0"),
        "xxhash": Tested("3.4.1", "4.1"),
        "zstandard": Tested("0.23", "0.25"),
        "boto3": Tested("1.40", "1.44"),
        "cryptography": Tested("43", "50.0"),
        "prometheus-client": Tested("0.20", "0.26"),
        "safetensors": Tested("0.4.3", "0.8"),
        "torch": Tested("2.13", "2.13"),
        "transformers": Tested("5.5", "5.24"),
        "vllm": Tested("0.31", "0.32"),
    }
)
"""Range of releases by package. Tests compare it with the constraint files, the Makefile (vLLM) and
the table in docs/releases.md."""

_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release without a pre-release or a build, such as (2, 13, 0) for
    ``2.13.0+cpu``."""
    found = _RELEASE.match(release)
    if found is None:
        return ()
    return tuple(map(int, found[0].split(".")))
