"""``persistkv label``, ``pin`` and ``unpin``: change the labels and pins of requests while other
processes write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.storage.inspection.handle import open_store
from persistkv_tools import options, render

_ATTEMPTS = 100


def label(
    url: options.Url,
    request: options.RequestId,
    labels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Labels to set; they replace those of the same name.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove this label; can be repeated."
        ),
    ] = None,
    namespace: options.InNamespace = None,
    json: options.Json = False,
) -> None:
    """Set or remove labels of a request. ls, prune and copy can select by label. Counts as
    a use.

    Example: persistkv label lmdb:///var/cache/kv 0c4de6a0 user=anna project=moon --remove draft
    """
    if not (labels or remove):
        raise MissingOptionError("label", "NAME=VALUE or --remove NAME")
    given = parse_labels(labels or [])
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


def pin(
    url: options.Url,
    request: options.RequestId,
    namespace: options.InNamespace = None,
    json: options.Json = False,
) -> None:
    """Keep a request until it is unpinned: it is not evicted, and expires only if it has a ttl of
    its own.

    Example: persistkv pin lmdb:///var/cache/kv 0c4de6a0
    """
    _pin(url, request, namespace, json, pinned=True)


def unpin(
    url: options.Url,
    request: options.RequestId,
    namespace: options.InNamespace = None,
    json: options.Json = False,
) -> None:
    """Allow a pinned request to be evicted and to expire again.

    Example: persistkv unpin lmdb:///var/cache/kv 0c4de6a0
    """
    _pin(url, request, namespace, json, pinned=False)


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
