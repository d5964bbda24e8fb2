"""``persistkv why``: in which fields of their identities two things differ, so that one does not serve the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from persistkv.errors import ConfigurationError, FieldDifference
from persistkv.storage.backend import Namespace
from persistkv.storage.fingerprint import fingerprint_checkpoint
from persistkv.storage.identity import Identity

_DTYPES = ("dtype", "torch_dtype")


class DifferenceView(msgspec.Struct, frozen=True):
    """One field."""

    field: str
    """Dotted path, e.g. ``config.rope_theta``."""
    ours: Any
    """What was compared with the store; null where it lacks the field."""
    theirs: Any
    """What the store holds; null where it lacks the field."""

    @classmethod
    def of(cls, difference: FieldDifference) -> DifferenceView:
        """The view of a difference."""
        return cls(difference.field, difference.ours, difference.theirs)


class ComparisonView(msgspec.Struct, frozen=True):
    """One namespace of the store against one other thing."""

    ours: str
    """What was compared: a namespace's id, or a model's directory."""
    theirs: str
    """The namespace's id."""
    matches: bool
    """Whether nothing that was compared differs."""
    compared: int
    """Fields."""
    not_compared: list[str]
    """Fields of the identity that only a loaded model tells; empty between namespaces."""
    differences: list[DifferenceView]


def compare_namespaces(ours: Namespace, theirs: Namespace) -> ComparisonView:
    """Field by field."""
    differences = ours.identity.diff(theirs.identity)
    views = list(map(DifferenceView.of, differences))
    return ComparisonView(ours.id.hex(), theirs.id.hex(), not views, _count(theirs.identity), [], views)


def compare_model(directory: Path, theirs: Namespace) -> ComparisonView:
    """A checkpoint against a namespace, without loading the model: weights, dtype, and what its config.json says.

    What config.json leaves to defaults, and what only an engine knows, is not compared.

    :raises ConfigurationError: there are no weights or no readable config.json.
    """
    stored = theirs.identity.fields
    ours: dict[str, Any] = {"weights": fingerprint_checkpoint(directory)}
    config = _read_config(directory)
    for name in _DTYPES:
        if isinstance(stored.get("dtype"), dict) and isinstance(config.get(name), str):
            ours["dtype"] = {"model": config[name]}
    ours["config"] = _common(config, stored.get("config", {}))
    known = Identity.of(ours)
    matching = Identity.of(_common(stored, ours))
    differences = list(map(DifferenceView.of, known.diff(matching)))
    left = [name for name in stored if name not in ours]
    return ComparisonView(str(directory), theirs.id.hex(), not differences, _count(known), sorted(left), differences)


def nearest(comparisons: Sequence[ComparisonView]) -> ComparisonView:
    """The one with the fewest differences; of equals, the first. There must be one."""
    return min(comparisons, key=lambda found: len(found.differences))


def _count(identity: Identity) -> int:
    """Its fields."""
    return sum(bool(difference.field) for difference in Identity({}).diff(identity))


def _common(values: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """The values whose names, level by level, the others have too."""
    found = {}
    for name, value in values.items():
        if isinstance(others, Mapping) and name in others:
            both = isinstance(value, Mapping) and isinstance(others[name], Mapping)
            found[name] = _common(value, others[name]) if both else value
    return found


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError("--against", str(path), f"a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("--against", str(path), f"JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigurationError("--against", str(path), "a JSON object")
    return config
