"""What engines show of themselves."""

from __future__ import annotations

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend
from persistkv.testing.conformance.suite import BackendSuite


class StatusTests(BackendSuite):
    """``publish_status`` and ``statuses``."""

    def test_rows_are_shown_replaced_and_taken_away(self, backend: Backend) -> None:
        backend.publish_status("one", b"first")
        if not self.driver.capabilities.shows_status:
            assert backend.statuses() == {}
            return
        backend.publish_status("other", b"theirs")
        backend.publish_status("one", b"second")
        assert backend.statuses() == {"one": b"second", "other": b"theirs"}
        for _ in range(2):
            backend.publish_status("one", None)
        assert backend.statuses() == {"other": b"theirs"}

    def test_another_handle_sees_them_and_may_not_write(self, backend: Backend, url: str) -> None:
        self.need_sharing()
        if not self.driver.capabilities.shows_status:
            pytest.skip("the driver shows nothing")
        reader = self.open(url, read_only=True)
        assert reader.statuses() == {}
        backend.publish_status("one", b"row")
        assert reader.statuses() == {"one": b"row"}
        with pytest.raises(StoreError):
            reader.publish_status("two", b"row")
        reader.close()
