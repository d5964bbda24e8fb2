"""Options that name a key."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.key_options import KeyOptions

SECRET = "0123456789abcdef" * 4
EXPECTED = StoreKey(SECRET.encode()).id
VARIABLE = "PERSISTKV_TEST_KEY"


def test_key_options_each_source_gives_same_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv(VARIABLE, SECRET)
    program = f"print('{SECRET}')"
    command = shlex.join([sys.executable, "-c", program])
    for options in (
        KeyOptions(key_file=str(file)),
        KeyOptions(key_env=VARIABLE),
        KeyOptions(key_command=command),
    ):
        key = options.store_key()
        assert key is not None
        assert key.id == EXPECTED
    assert KeyOptions().store_key() is None


def test_key_options_two_sources_raise() -> None:
    with pytest.raises(ConfigurationError, match="key_env"):
        KeyOptions(key_file="x", key_env="y")


@pytest.mark.parametrize("content", ["hunter2", ""])
def test_key_options_short_key_raises_without_showing_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    monkeypatch.setenv(VARIABLE, content)
    command = shlex.join(["cat", str(file)])
    for name, value in (
        ("key_file", str(file)),
        ("key_env", VARIABLE),
        ("key_command", command),
    ):
        with pytest.raises(ConfigurationError, match=name) as caught:
            KeyOptions(**{name: value}).store_key()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("key_file", "/no/such/file", "cannot read"),
        ("key_env", "NOT_SET_AT_ALL", "found 0"),
        ("key_command", "/no/such/command", "No such file"),
        ("key_command", "sh -c 'echo it failed >&2; exit 3'", "3: it failed"),
        ("key_command", "'", "ValueError"),
        ("key_command", "", "key_command"),
        ("key_file", "a\0b", "key_file"),
        ("key_env", "a\0b", "found 0"),
        ("key_file", "/dev/zero", "at most 65536 bytes"),
        ("key_command", "head -c 100000 /dev/zero", "at most 65536 bytes"),
    ],
)
def test_key_options_unreadable_key_raises(
    name: str,
    value: str,
    expected: str,
) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        KeyOptions(**{name: value}).store_key()


def test_key_options_key_that_is_no_text_is_the_same_from_each_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = bytes(range(128, 192))
    file = tmp_path / "key"
    file.write_bytes(secret)
    monkeypatch.setitem(os.environb, VARIABLE.encode(), secret)
    for options in (
        KeyOptions(key_file=str(file)),
        KeyOptions(key_env=VARIABLE),
        KeyOptions(key_command=shlex.join(["cat", str(file)])),
    ):
        key = options.store_key()
        assert key is not None
        assert key.id == StoreKey(secret).id


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_key_options_command_that_hangs_raises_at_deadline() -> None:
    """The command leaves a process behind that has its output open, too."""
    command = "sh -c 'sleep 300 & sleep 300'"
    begin = time.monotonic()
    with pytest.raises(ConfigurationError, match="TimeoutExpired"):
        KeyOptions(key_command=command).store_key()
    assert 25 < time.monotonic() - begin < 60
