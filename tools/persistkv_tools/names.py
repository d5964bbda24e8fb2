"""Names of stores that the user's configuration file gives to URLs."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from persistkv.errors import ConfigurationError, FileError

FILE = "persistkv/config.toml"
"""Path of the file below ``$XDG_CONFIG_HOME``, which is ``~/.config`` by default."""
_TABLE = "stores"


def config_file() -> Path:
    """Return the path of the configuration file, which need not exist."""
    parent = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(parent) / FILE


def named_stores() -> dict[str, str]:
    """Return the URLs or paths of stores by name: the table ``[stores]`` of the file; empty without
    a file.

    :raises FileError: the file cannot be read, or is no TOML.
    :raises ConfigurationError: a store is no text.
    """
    path = config_file()
    try:
        content = tomllib.loads(path.read_text())
    # most users have no configuration file, so its absence is no error
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise FileError("read", path, error) from None
    stores = content.get(_TABLE, {})
    if not isinstance(stores, dict):
        raise ConfigurationError(f"{path}: {_TABLE}", stores, f"a table [{_TABLE}]")
    for name, url in stores.items():
        if not isinstance(url, str):
            raise ConfigurationError(f"{path}: {name}", url, "a URL or path in quotes")
    return stores
