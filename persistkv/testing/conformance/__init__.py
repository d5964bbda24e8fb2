"""Conformance suite of drivers, as one test class.

A driver's tests subclass it, and define the driver and the URLs of its stores:

    class TestMyBackend(BackendConformance):
        driver = MyBackend

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}/store"

        @pytest.fixture
        def raw(self, url, backend):
            return MyRawStore(url)  # the medium's own client, without the driver

Tests of features that a driver's ``Capabilities`` exclude are skipped.
"""

from persistkv.testing.conformance.commits import ChangesTests, CommitTests
from persistkv.testing.conformance.content import ManifestTests, ReadTests
from persistkv.testing.conformance.eviction import EvictionTests
from persistkv.testing.conformance.stores import OpeningTests, ProcessTests, StatusTests
from persistkv.testing.conformance.suite import RawKind, RawStore

__all__ = ["BackendConformance", "RawKind", "RawStore"]


class BackendConformance(
    OpeningTests, CommitTests, EvictionTests, ChangesTests, ReadTests, ManifestTests, StatusTests, ProcessTests
):
    """Tests of each statement in the contract of ``persistkv.storage.backend``."""
