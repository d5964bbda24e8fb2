from importlib.metadata import EntryPoint

import pytest

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage import registry
from persistkv.testing.memory import MemoryBackend


@pytest.fixture
def installed(monkeypatch):
    """Says which drivers are installed."""

    def install(**drivers):
        points = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in drivers.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return install


def test_shipped_drivers_are_found():
    assert registry.backend_class("memory") is MemoryBackend
    assert registry.backend_class("lmdb").__name__ == "LmdbBackend"


def test_unknown_scheme_names_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"nope.*lmdb.*memory"):
        registry.open_backend("nope://somewhere")


def test_open(tmp_path):
    backend = registry.open_backend("memory://here?capacity=1MiB")
    assert backend.stats().capacity == 1 << 20
    with pytest.raises(StoreUnavailableError):
        registry.open_backend(f"lmdb://{tmp_path}/none", read_only=True)


def test_no_driver_at_all(installed):
    installed()
    with pytest.raises(ConfigurationError, match="no backend installed"):
        registry.backend_class("lmdb")


def test_driver_that_does_not_import(installed):
    installed(broken="no_such_module_here:Backend", nameless="persistkv.errors:NoSuchName")
    with pytest.raises(ConfigurationError, match="no_such_module_here"):
        registry.backend_class("broken")
    with pytest.raises(ConfigurationError, match="nameless"):
        registry.backend_class("nameless")


@pytest.mark.parametrize("value", ["persistkv.errors:StoreError", "persistkv.storage.registry:ENTRY_POINT_GROUP"])
def test_what_is_no_driver(installed, value):
    installed(odd=value)
    with pytest.raises(ConfigurationError, match="is no Backend"):
        registry.backend_class("odd")
