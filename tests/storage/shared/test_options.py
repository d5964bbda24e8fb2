"""Options in the URL of a shared store."""

from __future__ import annotations

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend


@pytest.mark.parametrize("place", ["s3://bucket/p", "file:///mnt/kv"])
def test_open_mistyped_option_raises_and_names_options_of_every_store(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"option capcity.* one of .*capacity, .*refresh, .*ttl"):
        open_backend(f"{place}?capcity=1GiB")
