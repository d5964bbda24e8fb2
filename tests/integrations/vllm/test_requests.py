from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from persistkv.base import OffloadKey, RequestDescription, Retention, make_offload_key
from persistkv.integrations.request_options import RequestOptions
from persistkv.integrations.vllm.requests import (
    GivenOptions,
    LiveRequest,
    Prefetch,
    request_options,
)
from persistkv.storage.records import Choice
from persistkv.tenants import tenant_key
from persistkv.tiering.load_cost import LoadDecision, Reason

CHUNK = 16


def keys_of(group: int, count: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([index]) * 32, group) for index in range(count)]


def request(positions: dict[OffloadKey, int], **options: Any) -> LiveRequest:
    return LiveRequest(
        "request",
        RequestOptions(**options),
        positions.get,
        (CHUNK, CHUNK),
        {"model": "tiny"},
    )


def positions_of(*groups: list[OffloadKey]) -> dict[OffloadKey, int]:
    return {
        key: (index + 1) * CHUNK for keys in groups for index, key in enumerate(keys)
    }


def end(live: LiveRequest) -> RequestDescription:
    """End a request, and return its description."""
    description = live.end().description
    assert description is not None
    return description


def test_live_request_stored_keys_are_sorted_by_position() -> None:
    full, window = keys_of(0, 4), keys_of(1, 4)
    live = request(positions_of(full, window))
    for keys in ([full[2], window[3]], [full[0], full[1], full[2], window[2]]):
        live.add_stored(keys, keys)
    description = end(live)
    assert list(description.group_keys) == [full[:3], window[2:]]
    assert description.num_tokens == 4 * CHUNK
    assert [description.depth(key) for key in window[2:]] == [2, 3]
    assert description.labels == {"model": "tiny"}


def test_live_request_key_without_position_drops_description() -> None:
    keys = keys_of(0, 2)
    live = request(positions_of(keys[:1]))
    live.add_stored(keys[:1], keys[:1])
    assert live.context.description is not None
    live.add_stored(keys, keys)
    assert live.context.description is None
    assert live.end().description is None


def test_live_request_min_tokens_is_checked_for_first_keys_only() -> None:
    keys = keys_of(0, 4)
    short, long = request(positions_of(keys)), request(positions_of(keys))
    assert not short.must_store(keys[:1], 2 * CHUNK)
    assert not short.must_store(keys[1:], 2 * CHUNK)
    assert long.must_store(keys[:2], 2 * CHUNK)
    assert long.must_store(keys[:1], 2 * CHUNK)


def test_live_request_opted_out_must_store_no_keys() -> None:
    keys = keys_of(0, 1)
    assert not request(positions_of(keys), store=False).must_store(keys, 0)


@pytest.mark.parametrize(
    ("parameters", "store", "load"),
    [
        (None, True, True),
        ({"other": 1}, True, True),
        ({"persistkv": True}, True, True),
        ({"persistkv": False}, False, False),
        ({"persistkv": {"store": False}}, False, True),
        ({"persistkv": {"load": False}}, True, False),
    ],
)
def test_request_options_parameters_set_store_and_load(
    parameters: dict[str, Any] | None, store: bool, load: bool
) -> None:
    options = request_options("a", parameters).options
    assert (options.store, options.load) == (store, load)


def test_live_request_labels_override_tier_labels() -> None:
    given = request_options("a", {"persistkv": {"labels": {"user": "anna"}}})
    options = given.options
    live = LiveRequest(
        "a",
        options,
        positions_of(keys_of(0, 1)).get,
        (CHUNK,),
        {"model": "tiny", "user": "all"},
    )
    assert end(live).labels == {"model": "tiny", "user": "anna"}


@pytest.mark.parametrize("value", ["off", {"stores": False}, {"store": "never"}, 3])
def test_request_options_invalid_parameters_disable_store_and_load(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = RequestOptions(store=False, load=False)
    found = request_options("a", {"persistkv": value})
    assert found == GivenOptions(options, [], is_refused=True)
    assert "kv_transfer_params.persistkv" in caplog.text


def action(kind: str, payload: Any, version: str = "1") -> SimpleNamespace:
    """Return an object with the interface of vLLM's ``KvHintAction``."""
    return SimpleNamespace(
        action_id="1", action_type=kind, action_version=version, payload=payload
    )


@pytest.mark.parametrize("parameters", [["store"], "store", 7, [{"tenant": "anna"}]])
def test_request_options_parameters_of_another_type_refuse_request(
    parameters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients pass any value with ``vllm_xargs``; an error would end the engine."""
    found = request_options("r1", parameters)
    assert found.is_refused
    assert not found.options.store
    assert not found.options.load
    assert "kv_transfer_params" in caplog.text


def test_request_options_hints_override_parameters() -> None:
    parameters = {
        "persistkv": {
            "store": False,
            "load": False,
            "labels": {"user": "anna", "turn": "1"},
        }
    }
    hints = [
        action("persistkv.retain", {"pin": True, "ttl": "1h", "store": True}),
        action("other.component", {"pin": False}),
        action("persistkv.retain", {"labels": {"turn": "2"}, "priority": "low"}),
    ]
    options, prefetches, is_refused = request_options("a", parameters, hints)
    assert not is_refused
    assert options == RequestOptions(
        store=True,
        load=False,
        labels={"user": "anna", "turn": "2"},
        pin=True,
        ttl="1h",
        priority="low",
    )
    assert prefetches == []
    live = LiveRequest("a", options, lambda key: None, (CHUNK,), {})
    description = live.context.description
    assert description is not None
    assert description.retention == Retention(pin=True, ttl_s=3600.0, priority="low")


def test_request_options_without_retention_use_default_retention() -> None:
    given = request_options("a", {"persistkv": {"labels": {"user": "anna"}}})
    assert given.options.retention == Retention()


def test_request_options_prefetch_hints_return_prefetches() -> None:
    hints = [
        action("persistkv.prefetch", {"request": "abc"}),
        action("persistkv.prefetch", {"labels": {"session": "7"}}),
        action("persistkv.prefetch", {"token_ids": [3, 1], "cache_salt": "tenant"}),
    ]
    options, prefetches, _ = request_options("a", None, hints)
    assert options == RequestOptions()
    assert [prefetch.choice("anna") for prefetch in prefetches[:2]] == [
        Choice("abc", tenant="anna"),
        Choice(labels={"session": "7"}, tenant="anna"),
    ]
    assert prefetches[2] == Prefetch(token_ids=[3, 1], cache_salt="tenant")


def test_request_options_prefetch_parameter_returns_prefetch() -> None:
    parameters = {"persistkv": {"store": False, "prefetch": {"token_ids": [3, 1]}}}
    assert request_options("a", parameters) == GivenOptions(
        RequestOptions(store=False), [Prefetch(token_ids=[3, 1])]
    )


def test_request_options_malformed_prefetch_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {"persistkv": {"pin": True, "prefetch": [3]}}
    assert request_options("a", parameters) == GivenOptions(
        RequestOptions(pin=True), []
    )
    (record,) = caplog.records
    assert "prefetch" in record.getMessage()


@pytest.mark.parametrize(
    ("kind", "payload", "version"),
    [
        ("persistkv.retain", {"pins": True}, "1"),
        ("persistkv.retain", {"pin": "yes"}, "1"),
        ("persistkv.retain", {"ttl": 60}, "1"),
        ("persistkv.retain", {"ttl": "soon"}, "1"),
        ("persistkv.retain", {"ttl": "0s"}, "1"),
        ("persistkv.retain", {"ttl": "-1h"}, "1"),
        ("persistkv.retain", {"priority": "lowest"}, "1"),
        ("persistkv.retain", {"priority": 0}, "1"),
        ("persistkv.retain", {"labels": ["a"]}, "1"),
        ("persistkv.retain", {"labels": {"a": 1}}, "1"),
        ("persistkv.retain", [], "1"),
        ("persistkv.retain", {"pin": True}, "2"),
        ("persistkv.evict", {}, "1"),
        ("persistkv.prefetch", {}, "1"),
        ("persistkv.prefetch", {"labels": {}}, "1"),
        ("persistkv.prefetch", {"label": {"a": "b"}}, "1"),
        ("persistkv.prefetch", None, "1"),
        ("persistkv.prefetch", {"token_ids": []}, "1"),
        ("persistkv.prefetch", {"token_ids": "abc"}, "1"),
        ("persistkv.prefetch", {"token_ids": [1, "2"]}, "1"),
        ("persistkv.prefetch", {"token_ids": [-1]}, "1"),
        ("persistkv.prefetch", {"token_ids": [1], "cache_salt": 3}, "1"),
        ("persistkv.prefetch", {"token_ids": [1], "request": "abc"}, "1"),
        ("persistkv.prefetch", {"labels": {"a": "b"}, "cache_salt": "tenant"}, "1"),
        ("persistkv.prefetch", {"labels": {"a": "b"}, "tenant": "anna"}, "1"),
    ],
)
def test_request_options_malformed_hint_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
    kind: str,
    payload: Any,
    version: str,
) -> None:
    hints = [action(kind, payload, version)]
    assert request_options("a", None, hints) == GivenOptions(RequestOptions(), [])
    (record,) = caplog.records
    assert kind in record.getMessage()


REFUSED = GivenOptions(RequestOptions(store=False, load=False), [], is_refused=True)


@pytest.mark.parametrize("tenant", ["", "x" * 129, "a\nb", "\ud800", 7, ["a"], {}])
def test_request_options_malformed_tenant_refuses_and_is_logged_once(
    tenant: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefetch = {"labels": {"session": "7"}}
    parameters = {"persistkv": {"tenant": tenant, "prefetch": prefetch}}
    assert request_options("a", parameters) == REFUSED
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("request a neither uses nor fills the store: ")
    assert "tenant" in text


@pytest.mark.parametrize(
    ("kind", "payload", "version"),
    [
        ("persistkv.retain", {"tenant": ""}, "1"),
        ("persistkv.retain", {"tenant": 7}, "1"),
        ("persistkv.retain", {"tenant": "anna", "pins": True}, "1"),
        ("persistkv.retain", {"tenant": "anna"}, "2"),
        ("persistkv.tenant", {"tenant": "anna"}, "1"),
    ],
)
@pytest.mark.parametrize("parameters", [None, {"persistkv": {"tenant": "berta"}}])
def test_request_options_ignored_hint_that_names_tenant_refuses_request(
    parameters: dict[str, Any] | None,
    kind: str,
    payload: dict[str, Any],
    version: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request would be stored as one of another tenant."""
    hints = [
        action(kind, payload, version),
        action("persistkv.retain", {"store": True}),
    ]
    assert request_options("a", parameters, hints) == REFUSED
    (record,) = caplog.records
    assert "neither uses nor fills the store" in record.getMessage()


def test_request_options_hint_names_tenant_and_overrides_parameters() -> None:
    parameters = {"persistkv": {"tenant": "berta"}}
    assert request_options("a", parameters).options.tenant == "berta"
    hints = [action("persistkv.retain", {"tenant": "anna"})]
    assert request_options("a", parameters, hints).options.tenant == "anna"
    silent = [action("persistkv.retain", {"tenant": None, "pin": True})]
    assert request_options("a", parameters, silent).options.tenant == "berta"


def test_live_request_of_tenant_lists_keys_of_tenant() -> None:
    keys = keys_of(0, 3)
    live = request(positions_of(keys), tenant="anna")
    store_keys = live.store_keys(keys)
    assert store_keys == [tenant_key("anna", key) for key in keys]
    live.add_stored(keys[::-1], store_keys[::-1])
    assert live.context.tenant == "anna"
    description = end(live)
    assert description.group_keys[0] == store_keys
    assert [description.depth(key) for key in store_keys] == [0, 1, 2]
    assert description.depth(keys[0]) is None


def test_is_declined_computed_or_loaded_elsewhere() -> None:
    found = request({})
    assert not found.loads.are_declined
    found.loads.decision = LoadDecision(1, Reason.LOADED, 0.1, 1.0, 0.3)
    assert not found.loads.are_declined
    found.loads.decision = LoadDecision(0, Reason.TOO_SLOW, 2.0, 1.0, 0.0)
    assert found.loads.are_declined
    found.loads.decision = None
    found.loads.are_elsewhere = True
    assert found.loads.are_declined
