from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persistkv.errors import ConfigurationError, FieldDifference
from persistkv.storage.identity import Identity

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
)
fields = st.dictionaries(st.text(), values, max_size=6)


@given(fields)
def test_identity_encode_and_decode_keep_digest(tree: dict[str, Any]) -> None:
    identity = Identity.of(tree)
    again = Identity.decode(identity.encode())
    assert again.digest == identity.digest
    assert len(identity.digest) == 16
    assert identity.diff(again) == []


def test_identity_model_name_is_recorded_but_not_compared() -> None:
    one, other = (
        Identity.of({"weights": "w", "model_name": name})
        for name in ("/models/a", "org/a")
    )
    assert (one, hash(one), one.digest) == (
        other,
        hash(other),
        Identity.of({"weights": "w"}).digest,
    )
    assert one.diff(other) == []
    assert Identity.decode(one.encode()).model_name == "/models/a"
    assert (
        Identity.of({"architecture": "LlamaForCausalLM"}).model_name
        == "LlamaForCausalLM"
    )
    assert Identity.of({"model_name": 7}).model_name == Identity.of({}).model_name == ""


@given(fields, fields)
def test_identity_different_fields_change_digest_and_give_diff(
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    ours, theirs = Identity.of(one), Identity.of(other)
    if ours.encode() == theirs.encode():
        assert ours.digest == theirs.digest
        assert ours.diff(theirs) == []
    else:
        assert ours.digest != theirs.digest
        assert ours.diff(theirs)


def test_identity_field_order_does_not_change_digest() -> None:
    assert (
        Identity.of({"a": 1, "b": {"c": 2, "d": 3}}).digest
        == Identity.of({"b": {"d": 3, "c": 2}, "a": 1}).digest
    )


def test_identity_encode_keeps_pinned_canonical_form() -> None:
    """With another canonical form, every existing store would miss."""
    identity = Identity.of({"b": [1, None, True], "a": {"ü": 1.5}})
    assert identity.encode() == '{"a":{"ü":1.5},"b":[1,null,true]}'.encode()
    assert identity.digest.hex() == "2f5190b70f35407319aeb2e0c3b19e1e"


def test_identity_tuple_equals_list() -> None:
    assert Identity.of({"a": (1, 2)}) == Identity.of({"a": [1, 2]})


@pytest.mark.parametrize("value", [math.nan, math.inf, b"bytes", {1, 2}, object()])
def test_identity_value_not_json_raises(value: object) -> None:
    with pytest.raises(ConfigurationError, match="identity"):
        Identity.of({"a": value})


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{", b"\xff", b'{"a":}'])
def test_identity_decode_not_json_object_raises(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Identity.decode(data)


def test_identity_diff_names_path_of_each_field() -> None:
    ours = Identity.of(
        {
            "config": {"rope_theta": 1e4, "layers": 8},
            "groups": [{"size": 1}, {"size": 2}],
            "dtype": "f32",
        }
    )
    theirs = Identity.of(
        {
            "config": {"rope_theta": 5e5, "layers": 8},
            "groups": [{"size": 1}, {"size": 3}],
            "extra": {},
        }
    )
    assert ours.diff(theirs) == [
        FieldDifference("config.rope_theta", 1e4, 5e5),
        FieldDifference("dtype", "f32", None),
        FieldDifference("extra", None, {}),
        FieldDifference("groups[1].size", 2, 3),
    ]
    assert (
        str(ours.diff(theirs)[0]) == "config.rope_theta: 10000.0 here, 500000.0 stored"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": None}, {}),
        ({"a": []}, {"a": {}}),
        ({"a": {}}, {}),
        ({"a": []}, {"a": [None]}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a": [1]}, {"a[0]": 1}),
        ({"": {}}, {}),
    ],
)
def test_identity_diff_reports_type_and_structure_differences(
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    assert Identity.of(one).diff(Identity.of(other))


def test_identity_nearest_returns_diff_to_most_similar() -> None:
    ours = Identity.of({"a": 1, "b": 2, "c": 3})
    far, near = Identity.of({"a": 1}), Identity.of({"a": 1, "b": 2, "c": 4})
    assert ours.nearest([far, near]) == near
    assert ours.diff(near) == [FieldDifference("c", 3, 4)]


def test_identity_encode_is_valid_json() -> None:
    identity = Identity.of({"a": 10**30, "b": 0.1})
    assert json.loads(identity.encode()) == {"a": 10**30, "b": 0.1}
    assert Identity.decode(identity.encode()).digest == identity.digest
