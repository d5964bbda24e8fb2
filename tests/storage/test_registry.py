import pytest

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage import BACKENDS, open_backend
from persistkv.testing.memory import MemoryBackend


def test_shipped_drivers_are_found():
    assert BACKENDS.get("memory") is MemoryBackend
    assert BACKENDS.get("lmdb").__name__ == "LmdbBackend"


def test_unknown_scheme_names_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"url scheme: 'nope'.*lmdb.*memory"):
        open_backend("nope://somewhere")


def test_open(tmp_path):
    backend = open_backend("memory://here?capacity=1MiB")
    assert backend.stats().capacity == 1 << 20
    with pytest.raises(StoreUnavailableError):
        open_backend(f"lmdb://{tmp_path}/none", read_only=True)
