from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from persistkv.errors import ConfigurationError
from persistkv.integrations.vllm.options import VllmTierOptions, vllm_options

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"


def test_options_table_of_docs_names_every_option_and_no_other() -> None:
    section = PAGE.read_text().partition("## Options of the tier")[2]
    table = section.partition("\n\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(VllmTierOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        (
            {"url": "lmdb:///var/kv", "capacity": "1GiB", "ttl": "7d"},
            "lmdb:///var/kv?capacity=1GiB&ttl=7d",
        ),
        (
            {"url": "s3://b/p?refresh=1s", "deadline": "5s"},
            "s3://b/p?refresh=1s&deadline=5s",
        ),
    ],
)
def test_vllm_options_store_options_are_added_to_url(
    options: dict[str, Any], url: str
) -> None:
    assert vllm_options(options).tier_options["url"] == url


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
def test_vllm_options_invalid_option_raises_naming_it(
    wrong: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        vllm_options(wrong)
    assert caught.value.field.split()[-1] == field
