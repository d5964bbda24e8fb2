"""``persistkv label``, ``pin`` and ``unpin``: change the labels and pins of requests while other
processes write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec
import typer

from persistkv import open_store
from persistkv.errors import ConfigurationError, MissingOptionError, StoreError
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv_tools import options, render
from persistkv_tools.options import FoundRequest, find_request
from persistkv_tools.packs import NamespacePacks

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


def relabel(
    backend: Backend,
    found: FoundRequest,
    given: Mapping[str, str],
    removed: Collection[str],
) -> dict[str, str]:
    """Set and remove labels of a request; return its labels afterwards. A change counts as a use of
    the request.

    :raises NotFoundError: the request was deleted meanwhile, or its keys are unreadable.
    :raises StoreError: a commit failed, or other processes wrote during each attempt. The labels
        are unchanged, unless only the second commit failed: then the labels are set, and a request
        that was hit counts as never hit.
    """
    namespace, name = found.namespace.id, found.manifest.id
    for _ in range(_ATTEMPTS):
        packs = NamespacePacks(backend, namespace)
        found = find_request(backend, name, namespace.hex())
        manifest, keys = found.manifest, found.keys(backend)
        labels = {
            name: value
            for name, value in {**manifest.labels, **given}.items()
            if name not in removed
        }
        if labels == manifest.labels:
            return labels
        held = packs.in_order(keys)
        write = ManifestWrite(
            msgspec.structs.replace(manifest, labels=labels), keys, held
        )
        (use,) = backend.catalogue(namespace).uses([name])
        if not backend.commit(
            namespace, CommitBatch(manifests=[write], seen=packs.cursor)
        ).stale:
            if use is not None and use.reused:  # the new row would count as never hit
                backend.commit(namespace, CommitBatch(touches=held))
            return labels
    raise StoreError(
        f"{name} could not be labelled: other processes wrote during all {_ATTEMPTS} attempts"
    )
