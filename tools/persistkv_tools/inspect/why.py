"""``persistkv why``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from persistkv.storage.backend import Namespace
from persistkv_tools import render
from persistkv_tools.inspect.comparing import ComparisonView, compare_model, compare_namespaces, nearest
from persistkv_tools.options import InNamespace, Json, Url, opened
from persistkv_tools.selection import NotFoundError, chosen_namespaces

_LONGEST = 200


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
    """What is compared, and the namespaces of the store that it is compared with."""
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
