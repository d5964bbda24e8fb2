from __future__ import annotations

from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage import BACKENDS, open_backend


def test_backends_shipped_drivers_are_registered() -> None:
    assert BACKENDS.get("lmdb").__name__ == "LmdbBackend"
    assert BACKENDS.get("s3").__name__ == "S3Backend"


def test_open_backend_unknown_scheme_raises_and_lists_known_schemes() -> None:
    with pytest.raises(ConfigurationError, match=r"url scheme: 'nope'.*lmdb.*s3"):
        open_backend("nope://somewhere")


def test_open_backend_applies_url_options_and_absent_store_raises(
    tmp_path: Path,
) -> None:
    backend = open_backend(f"lmdb://{tmp_path}/store?capacity=16MiB")
    assert backend.stats().capacity == 16 << 20
    backend.close()
    with pytest.raises(StoreUnavailableError):
        open_backend(f"lmdb://{tmp_path}/none", read_only=True)
