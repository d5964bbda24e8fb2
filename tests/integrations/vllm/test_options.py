from __future__ import annotations

import pytest

from persistkv.errors import ConfigurationError
from persistkv.integrations.vllm.options import tier_options


def test_options_of_the_store_go_into_its_url():
    options = tier_options({"url": "lmdb:///var/kv", "capacity": "1GiB", "ttl": "7d"})
    assert options.full_url == "lmdb:///var/kv?capacity=1GiB&ttl=7d"
    assert tier_options({"url": "s3://b/p?refresh=1s", "deadline": "5s"}).full_url == "s3://b/p?refresh=1s&deadline=5s"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "url"),
        ({"url": "nowhere"}, "url"),
        ({"url": "lmdb:///x", "capasity": 1}, "capasity"),
        ({"url": "lmdb:///x", "policy": "block"}, "policy"),
        ({"url": "lmdb:///x", "min_tokens": -1}, "min_tokens"),
        ({"url": "lmdb:///x", "io_threads": "many"}, "io_threads"),
        ({"url": "lmdb:///x", "labels": {"a": 1}}, "labels"),
        ({"url": "lmdb:///x", "locality": "NEAR"}, "locality"),
        ({"url": "lmdb:///x?ttl=1d", "ttl": "2d"}, "ttl"),
    ],
)
def test_a_wrong_option_is_named(wrong, field):
    with pytest.raises(ConfigurationError) as caught:
        tier_options(wrong)
    assert caught.value.field.split()[-1] == field
