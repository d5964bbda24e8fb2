"""``persistkv why``: the identity fields in which two namespaces, or a model and a namespace, differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from persistkv.errors import ConfigurationError, FieldDifference
from persistkv.storage.backend import Namespace
from persistkv.storage.identity import Identity, fingerprint_checkpoint
from persistkv_tools import render
from persistkv_tools.options import InNamespace, Json, Url, opened
from persistkv_tools.selection import NotFoundError, chosen_namespaces

_LONGEST = 200
_DTYPES = ("dtype", "torch_dtype")


class DifferenceView(msgspec.Struct, frozen=True):
    """One field."""

    field: str
    """Dotted path, e.g. ``config.rope_theta``."""
    ours: Any
    """Value of the compared side; null if it lacks the field."""
    theirs: Any
    """Value of the store; null if it lacks the field."""

    @classmethod
    def of(cls, difference: FieldDifference) -> DifferenceView:
        """The view of a difference."""
        return cls(difference.field, difference.ours, difference.theirs)


class ComparisonView(msgspec.Struct, frozen=True):
    """One namespace of the store against one other thing."""

    ours: str
    """The compared side: a namespace's id, or a model's directory."""
    theirs: str
    """The namespace's id."""
    matches: bool
    """Whether nothing that was compared differs."""
    compared: int
    """Fields."""
    not_compared: list[str]
    """Fields of the identity that only a loaded model tells; empty between namespaces."""
    differences: list[DifferenceView]


def why(
    url: Url,
    against: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="A model's directory, another store's URL, or a namespace's id.", show_default=False
        ),
    ],
    namespace: InNamespace = None,
    json: Json = False,
) -> None:
    """Show why a store does or does not serve something: the fields in which identities differ. Exit code 1: no match.

    Example: persistkv why lmdb:///var/cache/kv --against ./Llama-3.1-8B
    """
    with opened(url) as backend:
        ours, theirs = _sides(chosen_namespaces(backend, None), against, namespace)
    if not theirs:
        raise NotFoundError(f"{url} holds no {'other ' if ours else ''}namespace to compare with")
    if isinstance(ours, Path):
        comparisons = [nearest([compare_model(ours, space) for space in theirs])]
    else:
        comparisons = [nearest([compare_namespaces(own, space) for space in theirs]) for own in ours]
    if json:
        render.print_json({"url": url, "against": against, "comparisons": comparisons})
    else:
        for comparison in comparisons:
            _print(comparison)
    if not any(comparison.matches for comparison in comparisons):
        raise typer.Exit(1)


def _sides(held: list[Namespace], against: str, wanted: str | None) -> tuple[list[Namespace] | Path, list[Namespace]]:
    """The compared side, and the namespaces of the store to compare it with."""
    theirs = held if wanted is None else _of_id(held, wanted, "--namespace")
    if "://" in against:
        with opened(against) as other:
            ours = chosen_namespaces(other, None)
        if not ours:
            raise NotFoundError(f"{against} holds no namespace")
        return ours, theirs
    if Path(against).is_dir():
        return Path(against), theirs
    ours = _of_id(held, against, "--against")
    return ours, [space for space in theirs if space.id != ours[0].id]


def _of_id(held: list[Namespace], wanted: str, option: str) -> list[Namespace]:
    found = [space for space in held if wanted and space.id.hex().startswith(wanted.lower())]
    if len(found) != 1:
        ids = ", ".join(space.id.hex() for space in found or held) or "there are none"
        raise NotFoundError(
            f"{option} {wanted!r} is no directory, no URL, and the begin of {len(found)} namespaces' ids (held: {ids})"
        )
    return found


def _print(comparison: ComparisonView) -> None:
    ours = comparison.ours[:12] if len(comparison.ours) == 32 else comparison.ours
    if comparison.matches:
        render.say(f"{ours} matches namespace {comparison.theirs[:12]} in all {comparison.compared} fields compared")
    else:
        fields = render.count(len(comparison.differences), "field")
        title = f"{ours} and its nearest namespace {comparison.theirs[:12]} differ in {fields}"
        rows = [[found.field, _value(found.ours), _value(found.theirs)] for found in comparison.differences]
        render.console().print(render.table(("field", "ours", "stored"), rows, title=title, left="ours stored"))
    if comparison.not_compared:
        render.say(f"not compared, because only a loaded model tells: {', '.join(comparison.not_compared)}")


def _value(value: object) -> str:
    text = "(absent)" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def compare_namespaces(ours: Namespace, theirs: Namespace) -> ComparisonView:
    """Field by field."""
    differences = ours.identity.diff(theirs.identity)
    views = list(map(DifferenceView.of, differences))
    return ComparisonView(ours.id.hex(), theirs.id.hex(), not views, _count(theirs.identity), [], views)


def compare_model(directory: Path, theirs: Namespace) -> ComparisonView:
    """A checkpoint against a namespace, without loading the model: weights, dtype, and what its config.json says.

    Values that config.json leaves to defaults or that only an engine knows are not compared.

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
