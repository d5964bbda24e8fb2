from __future__ import annotations

from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage import BACKENDS, open_backend, open_inspectable


def test_shipped_drivers_are_found() -> None:
    assert BACKENDS.get("lmdb").__name__ == "LmdbBackend"
    assert BACKENDS.get("s3").__name__ == "S3Backend"


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"url scheme: 'nope'.*lmdb.*s3"):
        open_backend("nope://somewhere")


def test_open(tmp_path: Path) -> None:
    backend = open_inspectable(f"lmdb://{tmp_path}/store?capacity=16MiB")
    assert backend.stats().capacity == 16 << 20
    backend.close()
    with pytest.raises(StoreUnavailableError):
        open_backend(f"lmdb://{tmp_path}/none", read_only=True)
