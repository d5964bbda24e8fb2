"""``persistkv label``, ``pin`` and ``unpin``: change the labels and pins of requests while other
processes write."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence

from persistkv.base import check_labels
from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.inspection.handle import StoreHandle, open_store
from persistkv.storage.inspection.labels import relabel
from persistkv.storage.inspection.requests import (
    FoundRequest,
    NotFoundError,
    chosen_requests,
)
from persistkv.storage.inspection.selection import Selection
from persistkv_tools import render
from persistkv_tools.command import (
    REQUESTS,
    URL,
    Command,
    Positional,
    add_shared,
)

_WORDS = Positional(
    "words",
    "REQUEST|NAME=VALUE",
    "Ids of requests, or their first characters; labels to set.",
    is_many=True,
)


def label(
    url: str,
    words: list[str],
    *,
    label: list[str] | None,
    remove: list[str] | None,
    namespace: str | None,
    json: bool,
) -> None:
    """Set or remove labels of requests, chosen by id or by a label. ls, prune and copy can select
    by label. The change counts as a use of the request.

    Example: persistkv label lmdb:///var/cache/kv 0c4de6a0 user=anna project=moon --remove draft
    """
    selecting_labels = label
    # the words are ids of requests, and labels to set, which contain a "="
    requests = [word for word in words if "=" not in word]
    labels_to_set = parse_labels(word for word in words if "=" in word)
    names_to_remove = remove or []
    _check_changes(labels_to_set, names_to_remove)
    changed = []
    with open_store(url, read_only=False) as store:
        chosen = _chosen(store, "label", requests, selecting_labels, namespace)
        for found in chosen:
            labels = relabel(store.writable(), found, labels_to_set, names_to_remove)
            changed.append((found, labels))
    if json:
        rows = []
        for found, labels in changed:
            rows.append({**_json_ids(found), "labels": labels})
        render.print_json({"url": url, "requests": rows})
    else:
        _print_labels(changed)


def _print_labels(changed: Iterable[tuple[FoundRequest, Mapping[str, str]]]) -> None:
    """Print the requests with their new labels."""
    for found, labels in changed:
        text = render.format_labels(labels) or "no labels"
        render.say(f"{_text(found)}: {text}")


def _check_changes(
    to_set: Mapping[str, str],
    to_remove: Sequence[str],
) -> None:
    """Raise an error if there is nothing to change, or if one label is both set and removed."""
    if not (to_set or to_remove):
        raise MissingOptionError("label", "NAME=VALUE or --remove NAME")
    both = to_set.keys() & set(to_remove)
    if both:
        expected = "a label that the same command does not set"
        raise ConfigurationError("--remove", min(both), expected)


def _add_label_options(parser: ArgumentParser) -> None:
    add_shared(parser, "--label")
    parser.add_argument(
        "--remove",
        metavar="NAME",
        action="append",
        help="Remove this label; can be repeated.",
    )
    add_shared(parser, "--namespace")


LABEL = Command(label, (URL, _WORDS), _add_label_options)


def pin(
    url: str,
    requests: list[str],
    *,
    label: list[str] | None,
    namespace: str | None,
    json: bool,
) -> None:
    """Keep requests, chosen by id or by a label, until they are unpinned: they are not evicted, and
    expire only if they have a ttl of their own.

    Example: persistkv pin lmdb:///var/cache/kv 0c4de6a0 f3a1b2c3
    """
    _pin(url, requests, label, namespace, json, pinned=True)


def unpin(
    url: str,
    requests: list[str],
    *,
    label: list[str] | None,
    namespace: str | None,
    json: bool,
) -> None:
    """Allow pinned requests, chosen by id or by a label, to be evicted and to expire again.

    Example: persistkv unpin lmdb:///var/cache/kv --label user=anna
    """
    _pin(url, requests, label, namespace, json, pinned=False)


def _add_pin_options(parser: ArgumentParser) -> None:
    add_shared(parser, "--label", "--namespace")


PIN = Command(pin, (URL, REQUESTS), _add_pin_options)
UNPIN = Command(unpin, (URL, REQUESTS), _add_pin_options)


def _pin(
    url: str,
    requests: list[str],
    label: list[str] | None,
    namespace: str | None,
    json: bool,
    *,
    pinned: bool,
) -> None:
    """Pin or unpin the chosen requests."""
    command = "pin" if pinned else "unpin"
    with open_store(url, read_only=False) as store:
        chosen = _chosen(store, command, requests, label, namespace)
        # collect the changes by namespace, because a commit changes one namespace
        pins: dict[bytes, list[tuple[str, bool]]] = {}
        for found in chosen:
            of_namespace = pins.setdefault(found.namespace.id, [])
            of_namespace.append((found.manifest.id, pinned))
        for namespace_id, changes in pins.items():
            store.writable().commit(namespace_id, CommitBatch(pins=changes))
    if json:
        rows = [_json_ids(found) for found in chosen]
        render.print_json(
            {
                "url": url,
                "pinned": pinned,
                "requests": rows,
            }
        )
        return
    for found in chosen:
        render.say(f"{command}ned {_text(found)}")


def _chosen(
    store: StoreHandle,
    command: str,
    requests: Sequence[str],
    labels: list[str] | None,
    namespace: str | None,
) -> list[FoundRequest]:
    """Return the requests with these ids, or with these labels.

    :param command: name of the command, for errors.
    :raises NotFoundError: an id matches no request, or several; or no request has the labels.
    """
    # raise an error if neither or both are given
    if bool(requests) == bool(labels):
        raise MissingOptionError(command, "either REQUEST ... or --label NAME[=VALUE]")
    selection = Selection.parse(labels)
    found = chosen_requests(store.backend, requests, selection, namespace)
    if not found:
        raise NotFoundError(f"no request has the labels {' '.join(labels or ())}")
    return found


def _json_ids(found: FoundRequest) -> dict[str, object]:
    return {
        "id": found.manifest.id,
        "namespace": found.namespace.id.hex(),
    }


def _text(found: FoundRequest) -> str:
    return f"{found.manifest.id} (namespace {found.namespace.id.hex()[:8]})"


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return the labels of ``NAME=VALUE`` texts; raise ConfigurationError for another form, a name
    given twice, or a label that is too long."""
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigurationError("label", text, "NAME=VALUE")
        if name in labels:
            raise ConfigurationError(
                "label", text, f"each name once; {name} is given twice"
            )
        labels[name] = value
    check_labels(labels)
    return labels
