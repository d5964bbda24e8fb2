"""``persistkv label``, ``pin`` and ``unpin``: change the labels and pins of requests while other
processes write."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable

from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.storage.inspection.handle import open_store
from persistkv_tools import render
from persistkv_tools.command import REQUEST, URL, Command, Positional, add_namespace

_ATTEMPTS = 100


_LABELS = Positional(
    "labels",
    "NAME=VALUE",
    "Labels to set; they replace those of the same name.",
    is_many=True,
)


def label(
    url: str,
    request: str,
    labels: list[str],
    *,
    remove: list[str] | None,
    namespace: str | None,
    json: bool,
) -> None:
    """Set or remove labels of a request. ls, prune and copy can select by label. Counts as
    a use.

    Example: persistkv label lmdb:///var/cache/kv 0c4de6a0 user=anna project=moon --remove draft
    """
    if not (labels or remove):
        raise MissingOptionError("label", "NAME=VALUE or --remove NAME")
    given = parse_labels(labels)
    if both := given.keys() & set(remove or []):
        raise ConfigurationError(
            "--remove", min(both), "a label that the same command does not set"
        )
    with open_store(url, read_only=False) as store:
        now = store.label(request, given, remove=remove or [], namespace=namespace)
    if json:
        render.print_json(
            {
                "url": url,
                "request": now.id,
                "namespace": now.namespace,
                "labels": now.labels,
            }
        )
    else:
        render.say(
            f"{now.id} (namespace {now.namespace[:8]}): "
            f"{render.format_labels(now.labels) or 'no labels'}"
        )


def _add_label_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--remove",
        metavar="NAME",
        action="append",
        help="Remove this label; can be repeated.",
    )
    add_namespace(parser)


LABEL = Command(label, (URL, REQUEST, _LABELS), _add_label_options)


def pin(url: str, request: str, *, namespace: str | None, json: bool) -> None:
    """Keep a request until it is unpinned: it is not evicted, and expires only if it has a ttl of
    its own.

    Example: persistkv pin lmdb:///var/cache/kv 0c4de6a0
    """
    _pin(url, request, namespace, json, pinned=True)


PIN = Command(pin, (URL, REQUEST), add_namespace)


def unpin(url: str, request: str, *, namespace: str | None, json: bool) -> None:
    """Allow a pinned request to be evicted and to expire again.

    Example: persistkv unpin lmdb:///var/cache/kv 0c4de6a0
    """
    _pin(url, request, namespace, json, pinned=False)


UNPIN = Command(unpin, (URL, REQUEST), add_namespace)


def _pin(
    url: str, request: str, namespace: str | None, json: bool, *, pinned: bool
) -> None:
    with open_store(url, read_only=False) as store:
        found = store.pin(request, namespace=namespace, pinned=pinned)
    if json:
        render.print_json(
            {
                "url": url,
                "request": found.id,
                "namespace": found.namespace,
                "pinned": pinned,
            }
        )
    else:
        render.say(
            f"{'pinned' if pinned else 'unpinned'} {found.id} (namespace {found.namespace[:8]})"
        )


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return the labels of ``NAME=VALUE`` texts; raise ConfigurationError for another form, or a
    name given twice."""
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
    return labels
