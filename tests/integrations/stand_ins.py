"""Modules that stand for a package in environments without it."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path


def install_package(
    name: str,
    release: str,
    modules: Mapping[str, Sequence[type]],
    directory: Path,
) -> None:
    """Make modules with these classes importable, and the metadata of a release readable.

    :param modules: for each full name of a module, parents first, its classes.
    :param directory: an existing directory for the metadata.
    """
    info = directory / f"{name}-{release}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
    (info / "METADATA").write_text(metadata)
    sys.path.insert(0, str(directory))
    for full_name, classes in modules.items():
        module = types.ModuleType(full_name)
        module.__path__ = []
        for one in classes:
            setattr(module, one.__name__, one)
        sys.modules[full_name] = module
