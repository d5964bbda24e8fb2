"""Options that name the key of a store. Every medium has them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from persistkv.errors import ConfigurationError, FileError
from persistkv.storage.format.keys import StoreKey

_LEAST_BYTES = 32  # bytes of the shortest key
# 64 KiB: a larger file is something else, such as a model
_MOST_BYTES = 64 << 10
# 128 KiB of a file: room for white space around the longest key, and enough to see that a key is
# too long
_READ_BYTES = 2 * _MOST_BYTES
_COMMAND_S = 30.0  # bound on the run time of ``key_command``
KEY_OPTIONS = ("key_file", "key_env", "key_command")


class KeyOptions(msgspec.Struct, frozen=True):
    """Where the key of a store is. At most one option is given; without one, the store has no
    key.
    """

    key_file: str | None = None
    """Path of a file with the key: at least 32 bytes; surrounding white space is ignored."""
    key_env: str | None = None
    """Name of an environment variable with the key, which is as in a file."""
    key_command: str | None = None
    """Command that prints the key, such as a client of a key management service; the key is as in a
    file. The command is run without a shell, and may take 30 s."""

    def __post_init__(self) -> None:
        """:raises ConfigurationError: more than one option is given."""
        given = [name for name in KEY_OPTIONS if getattr(self, name) is not None]
        if len(given) > 1:
            first, second = given[:2]
            value = getattr(self, second)
            raise ConfigurationError(
                second, value, f"one key: {first} names another one"
            )

    def store_key(self) -> StoreKey | None:
        """Return the key; None if no option is given. Errors do not reveal the key.

        :raises ConfigurationError: the key cannot be read, is too short, or is more than 64 KiB.
        :raises MissingExtraError: the library for keys is not installed.
        """
        sources: dict[str, Callable[[str], bytes]] = {
            "key_file": _of_file,
            "key_env": _of_environment,
            "key_command": _of_command,
        }
        for name, read in sources.items():
            value = getattr(self, name)
            if value is None:
                continue
            secret = read(value).strip()
            if len(secret) < _LEAST_BYTES:
                expected = (
                    f"{_LEAST_BYTES} bytes or more there, such as openssl rand -hex 32 "
                    f"prints; found {len(secret)}"
                )
                raise ConfigurationError(name, value, expected)
            if len(secret) > _MOST_BYTES:
                raise ConfigurationError(
                    name, value, f"a key of at most {_MOST_BYTES} bytes"
                )
            return StoreKey(secret)
        return None


def _of_file(path: str) -> bytes:
    """Return the content of a key file; of a file that is too large, the beginning.

    :raises FileError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_READ_BYTES)
    except OSError as error:
        raise FileError("read", Path(path), error) from None
    except ValueError as error:
        # ValueError means that the path has a null byte
        raise ConfigurationError("key_file", path, f"a path ({error})") from None


def _of_environment(name: str) -> bytes:
    """Return the value of a variable as bytes, because it need not be text; empty if it is not
    set."""
    return os.environb.get(os.fsencode(name), b"")


def _of_command(command: str) -> bytes:
    """Run a command and return its output.

    :raises ConfigurationError: it cannot be run, or fails.
    """
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("it is empty")
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # name only the type of the error: its text may include output of the command, and so the
        # key
        why = type(error).__name__
        if isinstance(error, OSError):
            why = error.strerror or why
        raise ConfigurationError(
            "key_command", command, f"a command that prints the key ({why})"
        ) from None
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace")
        lines = errors.strip().splitlines()
        last_line = lines[-1] if lines else ""
        raise ConfigurationError(
            "key_command",
            command,
            f"a command that prints the key; exit code {done.returncode}: {last_line}",
        )
    return done.stdout
