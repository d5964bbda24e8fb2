"""Status of engines."""

from __future__ import annotations

import pytest

from persistkv.errors import StoreError
from persistkv.storage.extensions import InspectableBackend, SupportsStatus
from persistkv.testing.conformance.suite import BackendSuite


class StatusTests(BackendSuite):
    """Tests of ``publish_status`` and ``statuses``."""

    def test_rows_are_shown_replaced_and_taken_away(self, backend: InspectableBackend) -> None:
        if not isinstance(backend, SupportsStatus):
            pytest.skip("the driver shows nothing")
        backend.publish_status("one", b"first")
        backend.publish_status("other", b"theirs")
        backend.publish_status("one", b"second")
        assert backend.statuses() == {"one": b"second", "other": b"theirs"}
        for _ in range(2):
            backend.publish_status("one", None)
        assert backend.statuses() == {"other": b"theirs"}

    def test_another_handle_sees_them_and_may_not_write(self, backend: InspectableBackend, url: str) -> None:
        self.need_sharing()
        reader = self.open(url, read_only=True)
        if not (isinstance(backend, SupportsStatus) and isinstance(reader, SupportsStatus)):
            pytest.skip("the driver shows nothing")
        assert reader.statuses() == {}
        backend.publish_status("one", b"row")
        assert reader.statuses() == {"one": b"row"}
        with pytest.raises(StoreError):
            reader.publish_status("two", b"row")
        reader.close()
