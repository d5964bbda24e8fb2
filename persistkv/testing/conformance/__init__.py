"""What every driver has to do, as one test class.

A driver's tests subclass it, say which driver it is and where its stores lie:

    class TestMyBackend(BackendConformance):
        driver = MyBackend

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}/store"

        @pytest.fixture
        def raw(self, url, backend):
            return MyRawStore(url)  # the medium's own client, without the driver

What a driver cannot do, by its ``Capabilities``, is skipped.
"""

from persistkv.testing.conformance.changes import ChangesTests
from persistkv.testing.conformance.commits import CommitTests
from persistkv.testing.conformance.eviction import EvictionTests
from persistkv.testing.conformance.manifests import ManifestTests
from persistkv.testing.conformance.opening import OpeningTests
from persistkv.testing.conformance.processes import ProcessTests
from persistkv.testing.conformance.reads import ReadTests
from persistkv.testing.conformance.suite import RawKind, RawStore

__all__ = ["BackendConformance", "RawKind", "RawStore"]


class BackendConformance(
    OpeningTests, CommitTests, EvictionTests, ChangesTests, ReadTests, ManifestTests, ProcessTests
):
    """Each sentence of ``persistkv.storage.backend``, as a test."""
