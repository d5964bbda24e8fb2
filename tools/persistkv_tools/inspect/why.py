"""``persistkv why``: the identity fields in which two namespaces, or a model and a namespace,
differ; and why an engine computed a request."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from persistkv.errors import FileError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.host.status import read_statuses
from persistkv.storage.identity import Identity, fingerprint_checkpoint
from persistkv.storage.inspection.adoptions import adoptions
from persistkv.storage.inspection.requests import NotFoundError, chosen_namespaces
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    add_shared,
    looks_like_store,
    resolved,
)
from persistkv_tools.options import opened, show_adoptions

_AGAINST_HELP = "Directory of a model, another store, or id of a namespace."
_REQUEST_HELP = "Id of a request in its engine, or the beginning of the id."
_DTYPES = ("torch_dtype", "dtype")  # old and new name of the field in config.json
_NAMESPACE_ID = re.compile("[0-9a-f]{32}")


class DifferenceView(msgspec.Struct, frozen=True):
    """One identity field whose values differ."""

    field: str
    """Names of the nested fields, joined by dots."""
    ours: Any
    """Value of the namespace or model that is explained; None: it lacks the field."""
    theirs: Any
    """Value of the namespace that it is compared with; None: it lacks the field."""


class ComparisonView(msgspec.Struct, frozen=True):
    """Comparison of one namespace of the store with a model or another namespace."""

    ours: str
    """Id of the namespace, or directory of the model, that is explained."""
    theirs: str
    """Id of the namespace that it is compared with."""
    matches: bool
    """Whether all compared fields are equal."""
    compared: int
    """Number of compared fields."""
    not_compared: list[str]
    """Fields that only loading the model shows; empty between namespaces."""
    differences: list[DifferenceView]


class LoadView(msgspec.Struct, frozen=True):
    """Use of the blocks that the store held for a request of an engine."""

    engine: str
    """Id of the engine."""
    host: str
    request: str
    """The engine's id of the request."""
    reason: str
    """``loaded``, or why the engine computed the blocks; see ``_EXPLANATIONS``."""
    load_s: float | None
    """Seconds that the load took, or was expected to take if it was not begun; None: unknown."""
    compute_s: float | None
    """Seconds that the computation was expected to take; None: unknown."""
    time: float
    """When the engine decided, or the load ended: seconds since the epoch."""


def why(
    url: str,
    *,
    against: str | None,
    namespace: str | None,
    request: str | None,
    json: bool,
) -> None:
    """Explain why a model finds nothing in a store: show the identity fields that differ.

    Without --against, each namespace is compared with the most similar older one. With --against,
    the given model or namespaces are compared with the most similar namespace of the store; exit
    code 1: none matches.

    Namespaces that differ only in the engine's release may share blocks after a test. Its result is
    shown, too.

    With --request, show instead whether an engine loaded the blocks that the store held for a
    request, or why it computed them. Engines list their last 64 such requests.

    Example: persistkv why lmdb:///var/cache/kv --against ./Llama-3.1-8B
    """
    if request is not None:
        _why_request(url, request, json=json)
        return
    with opened(url) as backend:
        adopted = adoptions(backend)
        all_namespaces = chosen_namespaces(backend, None)
        chosen = chosen_namespaces(backend, namespace or None)
        # a list of comparisons for each namespace or model that is explained
        if against is not None:
            candidates = _compare_against(against, chosen, backend)
        else:
            # Among all namespaces, each pair is compared once, at its newer one. A chosen namespace
            # is compared with all others.
            only_older = not namespace
            candidates = _compare_within(chosen, all_namespaces, only_older=only_older)
    # keep the comparison with the fewest differences, which are the likely reason for misses
    comparisons = [min(found, key=_difference_count) for found in candidates]
    if json:
        report = {
            "url": url,
            "against": against,
            "request": None,
            "loads": [],
            "comparisons": comparisons,
            "adoptions": adopted,
        }
        render.print_json(report)
    else:
        num_namespaces = render.count(len(all_namespaces), "namespace")
        _print_all(comparisons, f"{url} has {num_namespaces}")
        show_adoptions(adopted)
    matches = any(comparison.matches for comparison in comparisons)
    if against is not None and not matches:
        raise SystemExit(1)


def _print_all(comparisons: Sequence[ComparisonView], store_content: str) -> None:
    """Print the comparisons.

    :param store_content: what the store has, for the text that is printed if there are none.
    """
    for comparison in comparisons:
        _print(comparison)
    if not comparisons:
        advice = "Name a model or another store with --against"
        render.say(f"{store_content}: nothing to compare. {advice}")


def _why_request(
    url: str,
    request: str,
    *,
    json: bool,
) -> None:
    """Show how the engines used the blocks that the store held for a request.

    :raises NotFoundError: no engine lists the request.
    """
    with opened(url) as backend:
        statuses = read_statuses(backend)
    loads = []
    for status in statuses:
        engine = {"engine": status.engine, "host": status.host}
        for found in status.load_reports:
            if found.request.startswith(request):
                loads.append(render.view_of(LoadView, found, **engine))
    if not loads:
        raise NotFoundError(
            f"no engine of {url} lists a request {request}: the store held no block for it, it is "
            f"not one of the last 64, or its engine publishes no status"
        )
    if json:
        # the JSON object has the same fields as without --request
        report = {
            "url": url,
            "against": None,
            "request": request,
            "loads": loads,
            "comparisons": [],
            "adoptions": [],
        }
        render.print_json(report)
        return
    for load in loads:
        render.say(f"{load.request} on {load.host}: {_explain(load)}")


_EXPLANATIONS = {
    "loaded": "loaded in {load_time}; computing was expected to take {compute_time}",
    "deadline": (
        "the load was abandoned after {load_time} (deadline); computing was expected to take "
        "{compute_time}"
    ),
    "refused": (
        "the request neither used nor filled the store (refused): it names no tenant, which the "
        "engine's option tenant requires, or its options are invalid"
    ),
}
"""Explanations of the reasons of a ``LoadView``."""
_COMPUTED = "computed ({reason}): a load was expected to take {load_time}, computing {compute_time}"
"""Explanation of all other reasons."""


def _explain(load: LoadView) -> str:
    """Return what became of the blocks of a request, in words."""
    explanation = _EXPLANATIONS.get(load.reason, _COMPUTED)
    return explanation.format(
        reason=load.reason,
        load_time=_time_text(load.load_s),
        compute_time=_time_text(load.compute_s),
    )


def _time_text(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.3f} s"


def _difference_count(comparison: ComparisonView) -> int:
    return len(comparison.differences)


def _compare_within(
    chosen: Sequence[Namespace],
    all_namespaces: Sequence[Namespace],
    *,
    only_older: bool,
) -> list[list[ComparisonView]]:
    """Return, for each chosen namespace, its comparisons with the others of its store.

    :param all_namespaces: those of the store, oldest first.
    :param only_older: compare each only with the older ones.
    """
    by_namespace = []
    for namespace in chosen:
        candidates = all_namespaces
        if only_older:
            position = all_namespaces.index(namespace)
            candidates = all_namespaces[:position]
        others = [other for other in candidates if other != namespace]
        comparisons = [compare_namespaces(namespace, other) for other in others]
        if comparisons:
            by_namespace.append(comparisons)
    return by_namespace


def _compare_against(
    against: str,
    chosen: Sequence[Namespace],
    backend: Backend,
) -> list[list[ComparisonView]]:
    """Return, for the model or each namespace that ``against`` names, its comparisons with the
    chosen namespaces.

    :raises NotFoundError: there is nothing to compare with.
    """
    path = Path(against)
    # a directory with data.mdb is an LMDB store that is given by its path, not a model
    is_model = path.is_dir() and not (path / "data.mdb").exists()
    if is_model:
        found = [[compare_model(path, other) for other in chosen]]
    else:
        found = _compare_namespaces_of(against, chosen, backend)
    if not any(found):
        raise NotFoundError("the store holds no other namespace to compare with")
    return found


def _compare_namespaces_of(
    against: str,
    chosen: Sequence[Namespace],
    backend: Backend,
) -> list[list[ComparisonView]]:
    """Return, for each namespace of the store ``against``, or for the namespace of this store with
    that id, its comparisons with the chosen namespaces."""
    others = list(chosen)
    if looks_like_store(against):
        named = _namespaces_of(against)
    else:
        error_end = ", nor does a model's directory or a store of this name"
        named = chosen_namespaces(backend, against, error_end)
        # a namespace is not compared with itself
        others = [other for other in chosen if other not in named]
    if not others:
        return []
    by_namespace = []
    for namespace in named:
        comparisons = [compare_namespaces(namespace, other) for other in others]
        by_namespace.append(comparisons)
    return by_namespace


def _namespaces_of(url: str) -> list[Namespace]:
    """Return the namespaces of another store; raise NotFoundError if it has none."""
    with opened(resolved(url)) as other:
        named = chosen_namespaces(other, None)
    if not named:
        raise NotFoundError(f"{url} holds no namespace")
    return named


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--against", metavar="WHAT", help=_AGAINST_HELP)
    add_shared(parser, "--namespace")
    parser.add_argument("--request", metavar="ID", help=_REQUEST_HELP)


COMMAND = Command(why, (URL,), _add_options)


def _print(comparison: ComparisonView) -> None:
    """Print one comparison: that all fields match, or a table of those that differ."""
    our_column = "model"
    our_name = comparison.ours
    if _is_namespace_id(comparison.ours):
        our_column = comparison.ours[:8]
        our_name = f"namespace {our_column}"
    their_column = comparison.theirs[:8]
    if comparison.matches:
        render.say(
            f"{our_name} matches namespace {their_column} in all {comparison.compared} "
            f"compared fields"
        )
    else:
        fields = render.count(len(comparison.differences), "field")
        title = (
            f"{our_name} and its nearest namespace {their_column} differ in {fields}"
        )
        columns: render.Columns = {
            "field": "field",
            our_column: lambda found: _value(found.ours),
            their_column: lambda found: _value(found.theirs),
        }
        render.show_table(
            columns,
            comparison.differences,
            title=title,
            left=f"{our_column},{their_column}",
        )
    if comparison.not_compared:
        names = ", ".join(comparison.not_compared)
        render.say(f"not compared, because only loading the model shows them: {names}")


def _is_namespace_id(name: str) -> bool:
    """Return whether one side of a comparison is the id of a namespace, not the directory of a
    model."""
    return _NAMESPACE_ID.fullmatch(name) is not None


def _value(value: object) -> str:
    return "(absent)" if value is None else render.cut(str(value))


def compare_namespaces(ours: Namespace, theirs: Namespace) -> ComparisonView:
    """Compare all identity fields of two namespaces."""
    differences = ours.identity.diff(theirs.identity)
    views = [DifferenceView(*difference) for difference in differences]
    num_compared = _count_fields(theirs.identity)
    return ComparisonView(
        ours=ours.id.hex(),
        theirs=theirs.id.hex(),
        matches=not views,
        compared=num_compared,
        not_compared=[],
        differences=views,
    )


def compare_model(directory: Path, theirs: Namespace) -> ComparisonView:
    """Compare the model in a directory with a namespace, without loading the model.

    Fields: the fingerprint of the weights, the dtype, and fields of config.json that the namespace
    has, too. Fields that config.json leaves to defaults and fields that only an engine knows are
    not compared.
    """
    stored = theirs.identity.properties
    ours: dict[str, Any] = {"weights": fingerprint_checkpoint(directory)}
    config = _read_config(directory / "config.json")
    dtype = _model_dtype(config)
    # compare only the model's part of this field, because the engine chooses the other parts
    if dtype is not None and isinstance(stored.get("dtype"), dict):
        ours["dtype"] = {"model": dtype}
    ours["config"] = _common(config, stored.get("config"))
    our_identity = Identity.of(ours)
    # leave out fields of the namespace that the model's files do not show
    their_identity = Identity.of(_common(stored, ours))
    differences = our_identity.diff(their_identity)
    views = [DifferenceView(*difference) for difference in differences]
    not_compared = [name for name in stored if name not in ours]
    return ComparisonView(
        ours=str(directory),
        theirs=theirs.id.hex(),
        matches=not views,
        compared=_count_fields(our_identity),
        not_compared=sorted(not_compared),
        differences=views,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json; raise FileError if it cannot be read, or is no
    JSON object."""
    try:
        # Python's parser accepts the value Infinity, which some models have
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError("read", path, error) from None
    except (ValueError, RecursionError) as error:
        raise FileError("read", path, ValueError(f"no JSON object ({error})")) from None
    if not isinstance(config, dict):
        reason = ValueError(f"no JSON object (it is a {type(config).__name__})")
        raise FileError("read", path, reason)
    return config


def _model_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype in a model's config.json; None: it names none."""
    for name in _DTYPES:
        dtype = config.get(name)
        if isinstance(dtype, str):
            return dtype
    return None


def _count_fields(identity: Identity) -> int:
    """Return the number of fields of an identity, nested ones included: all that differ from an
    empty identity."""
    differences = Identity({}).diff(identity)
    # leave out the difference of the whole identity, whose field name is empty
    return sum(difference.field != "" for difference in differences)


def _common(
    values: Mapping[str, Any],
    others: Any,
) -> dict[str, Any]:
    """Return the values whose names occur in ``others``, too; nested mappings are compared level by
    level. If ``others`` is no mapping, no name occurs in it."""
    found: dict[str, Any] = {}
    if not isinstance(others, Mapping):
        return found
    for name, value in values.items():
        if name not in others:
            continue
        found[name] = value
        if isinstance(value, Mapping) and isinstance(others[name], Mapping):
            found[name] = _common(value, others[name])
    return found
