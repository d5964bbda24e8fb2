"""Options that several commands share: opening stores, choosing requests, and the view of a
request."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from persistkv.config import parse_duration, parse_size
from persistkv.errors import (
    ConfigurationError,
    FileError,
    MissingOptionError,
    PersistKVError,
    StoreUnavailableError,
)
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.identity.verdict import verdicts
from persistkv.storage.stats import RequestUse
from persistkv_tools import render

_NAMED_AT_MOST = 5
_SHORT = 8  # characters of an id in tables
_COMPLETIONS = 100
_AT_ONCE = 256

STORE_VARIABLE = "PERSISTKV_STORE"
"""Environment variable with the URL of the store for commands that are given no URL."""
_STORE_HELP = "URL, e.g. lmdb:///var/cache/kv, or path of an LMDB store."
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help=_STORE_HELP, envvar=STORE_VARIABLE, show_default=False
    ),
]


def _complete_request(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return completions for the shell: full ids that begin with the text, or else short ids; with
    age and labels."""
    try:
        with opened(ctx.params.get("url") or ctx.params.get("source") or "") as backend:
            found = [
                (
                    name,
                    f"{render.format_age(manifest.created)} ago, {manifest.tokens:,} tokens "
                    f"{labels}".strip(),
                )
                for space in backend.namespaces()
                for manifest in backend.catalogue(space.id).manifests()
                for name in (manifest.id, short_id(manifest.id))
                for labels in [render.format_labels(manifest.labels)]
                if name.startswith(incomplete)
            ]
    except PersistKVError:
        return []
    long = [one for one in found if len(one[0]) != _SHORT]
    return sorted(long or found)[:_COMPLETIONS]


def _only(name: str, metavar: str | None, requests: str) -> Any:
    return typer.Option(name, metavar=metavar, help=f"Only requests {requests}.")


_ID_HELP = "Id of the request, or its first characters."
_IDS_HELP = "Ids of requests, or their first characters."
RequestId = Annotated[
    str,
    typer.Argument(
        metavar="REQUEST",
        help=_ID_HELP,
        show_default=False,
        autocompletion=_complete_request,
    ),
]
RequestIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="REQUEST", help=_IDS_HELP, autocompletion=_complete_request),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")
]
InNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="ID",
        help="Only this namespace: its id, or the first digits.",
    ),
]
Labels = Annotated[
    list[str] | None,
    _only("--label", "NAME[=VALUE]", "with this label; can be repeated"),
]
OlderThan = Annotated[
    str | None, _only("--older-than", "AGE", "older than this, e.g. 12h or 30d")
]
NewerThan = Annotated[
    str | None, _only("--newer-than", "AGE", "younger than this, e.g. 12h or 30d")
]
LargerThan = Annotated[
    str | None, _only("--larger-than", "SIZE", "with more raw bytes, e.g. 1GiB")
]
SmallerThan = Annotated[
    str | None, _only("--smaller-than", "SIZE", "with fewer raw bytes, e.g. 1GiB")
]
NeverHit = Annotated[
    bool, _only("--never-hit", None, "that were never used after they were stored")
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="SIZE", help="Read at most this much per second, e.g. 200MiB."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


class AdoptionView(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded verdict of a namespace about that of another engine release: see ``Verdict`` for the
    fields."""

    ours: str
    """Id of the namespace that may use the other's blocks."""
    theirs: str
    """Id of the other release's namespace."""
    verdict: str
    depths: tuple[int, ...]
    final: bool
    tokens: int
    error: float
    limit: float
    at: float


def adoptions(backend: Backend) -> list[AdoptionView]:
    """Return all recorded verdicts about namespaces of other engine releases."""
    spaces = chosen_namespaces(backend, None)
    return [
        render.view_of(AdoptionView, verdict, ours=ours.hex(), theirs=theirs.hex())
        for (ours, theirs), verdict in verdicts(backend, spaces).items()
    ]


def show_adoptions(found: Iterable[AdoptionView]) -> None:
    """Print one line for each verdict of a namespace about that of another engine release."""
    for one in found:
        error = f"error {one.error:.2g}, limit {one.limit:.2g}"
        if one.verdict == "adopted":
            depths = " and ".join(map(str, one.depths))
            text = (
                f"uses the first {depths} blocks of the contexts in namespace "
                f"{one.theirs[:8]}, of another release"
            )
        else:
            text = f"does not use namespace {one.theirs[:8]}, of another release: a block differed"
        render.say(f"namespace {one.ours[:8]} {text} ({error})")


class NotFoundError(PersistKVError):
    """No request or namespace of the store matches the given id, or several do."""


def ensure_consent(what: str, ways: str, *, yes: bool, json: bool) -> None:
    """Raise an error if the user has not consented (``yes``) and cannot be asked. Does not ask.

    :param what: command that needs consent, for the error.
    :param ways: options that give consent, for the error.
    """
    if not (yes or (sys.stdin.isatty() and not json)):
        raise MissingOptionError(
            what, f"{ways}: it cannot ask without a terminal, or with --json"
        )


def write_file(path: Path, content: bytes) -> None:
    """Write a file, which is replaced atomically."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise FileError("write", path, error) from None


@contextmanager
def open_if_exists(url: str) -> Iterator[Backend | None]:
    """Open a store read-only until the ``with`` statement ends.

    Yield None if it is absent or cannot be opened; in the latter case, opening it for writing
    reports the reason.
    """
    try:
        backend = open_backend(url, read_only=True)
    except StoreUnavailableError:
        yield None
        return
    with closing(backend):
        yield backend


@contextmanager
def opened(url: str, *, writable: bool = False) -> Iterator[Backend]:
    """Open an existing store, read-only unless ``writable``, until the ``with`` statement ends.

    :raises StoreUnavailableError: there is no store (none is created), or it cannot be reached.
    """
    with closing(open_backend(url, read_only=True)) as backend:
        if not writable:
            yield backend
            return
    with closing(open_backend(url)) as backend:
        yield backend


def short_id(request: str) -> str:
    """Return the request's id if it has at most 8 characters, or else 8 hexadecimal digits of its
    digest."""
    return (
        request
        if len(request) <= _SHORT
        else blake2b(request.encode(), digest_size=_SHORT // 2).hexdigest()
    )


class RequestView(msgspec.Struct, frozen=True):
    """A stored request: its context, its labels and its use."""

    id: str
    namespace: str
    """Id of the request's namespace, hexadecimal."""
    created: float
    """Time when the request was stored: seconds since the epoch."""
    tokens: int
    blocks: int
    group_blocks: tuple[int, ...]
    raw_bytes: int
    """Bytes of the request's blocks before the codec, including blocks that other requests
    share."""
    ordered: bool
    labels: dict[str, str]
    last_used: float | None = None
    """Last use of the whole context, in seconds since the epoch; None: unknown."""
    reused: bool | None = None
    """Whether the whole context was used after it was stored; None: unknown."""
    shared_by: int | None = None
    """Number of other requests whose contexts contain the whole context of this one; None:
    unknown."""
    pinned: bool | None = None
    """Whether the request is pinned; None: unknown."""
    hits: int | None = None
    """Number of the ``shared_by`` requests that were stored later than this one; None: unknown."""
    stored_bytes: int | None = None
    """Estimated size of the request's blocks in the store: ``raw_bytes`` divided by the codec ratio
    of its packs. None: unknown."""
    short_id: str = ""
    """At most 8 characters that the commands accept in place of the id."""
    context: str = ""
    """Digest of the request's keys, hexadecimal: equal for requests of the same context; empty:
    unknown."""
    copies: int = 1
    """Number of requests of the same context and labels that a list shows as this one, itself
    included."""
    ttl_s: float | None = None
    """The request's own ttl, in seconds from its last use; None: only the store's ttl applies."""
    priority: str = "normal"
    """Priority of the request: ``low`` is evicted before ``normal``."""

    @classmethod
    def of(
        cls, namespace: bytes, manifest: RequestManifest, use: RequestUse | None
    ) -> RequestView:
        """Return the view of a manifest head and of its use; None: unknown use."""
        return render.view_of(
            cls,
            manifest,
            namespace=namespace.hex(),
            short_id=short_id(manifest.id),
            context=manifest.context.hex(),
        ).with_use(use)

    def with_use(self, use: RequestUse | None) -> RequestView:
        """Return a copy with ``stored_bytes`` and the fields of the use set from ``use``; None:
        return this view."""
        if use is None:
            return self
        packed = use.packs_raw_bytes
        stored = (
            round(self.raw_bytes * use.packs_stored_bytes / packed) if packed else None
        )
        known = {
            name: getattr(use, name)
            for name in ("last_used", "reused", "shared_by", "pinned", "hits")
        }
        return msgspec.structs.replace(self, **known, stored_bytes=stored)


class FoundRequest(NamedTuple):
    """A request of a store, with its namespace."""

    namespace: Namespace
    manifest: RequestManifest

    def keys(self, backend: Backend) -> ManifestKeys:
        """Return the keys; raise ``NotFoundError`` if the request was deleted meanwhile or its keys
        are unreadable."""
        keys = backend.manifest_keys(self.namespace.id, [self.manifest.id])[0]
        if keys is None:
            raise NotFoundError(
                f"the keys of {self.manifest.id} were deleted or cannot be read; persistkv "
                f"verify shows which"
            )
        return keys

    def view(self, backend: Backend) -> RequestView:
        """Return the view of the request, with its use."""
        return RequestView.of(
            self.namespace.id,
            self.manifest,
            backend.catalogue(self.namespace.id).uses([self.manifest.id])[0],
        )


class Selection(msgspec.Struct, frozen=True):
    """Conditions on requests. A request must fulfil all of them; the default selects every
    request."""

    labels: tuple[tuple[str, str | None], ...] = ()
    """Labels that the request must have, as (name, value); a value of None: any value."""
    made_before: float | None = None
    """Latest time of creation, exclusive: seconds since the epoch; None: no bound."""
    made_after: float | None = None
    """Earliest time of creation, exclusive: seconds since the epoch; None: no bound."""
    more_bytes_than: int | None = None
    """Lower bound on the raw bytes of a request, exclusive; None: no bound."""
    fewer_bytes_than: int | None = None
    """Upper bound on the raw bytes of a request, exclusive; None: no bound."""
    never_hit: bool = False
    """Only requests that were never used after they were stored."""

    @classmethod
    def parse(
        cls,
        labels: Iterable[str] | None = None,
        older_than: str | None = None,
        newer_than: str | None = None,
        larger_than: str | None = None,
        smaller_than: str | None = None,
        *,
        never_hit: bool = False,
    ) -> Selection:
        """Return the selection that options of a command line describe.

        :raises ConfigurationError: an option is invalid; the error names it.
        """
        now = time.time()
        return cls(
            tuple(map(_label, labels or ())),
            None
            if older_than is None
            else now - parse_duration(older_than, name="--older-than"),
            None
            if newer_than is None
            else now - parse_duration(newer_than, name="--newer-than"),
            None
            if larger_than is None
            else parse_size(larger_than, name="--larger-than"),
            None
            if smaller_than is None
            else parse_size(smaller_than, name="--smaller-than"),
            never_hit,
        )

    def takes(self, manifest: RequestManifest, use: RequestUse | None = None) -> bool:
        """Return whether a request fulfils all conditions.

        :param use: use of the request, for ``never_hit``. None: unknown, ``never_hit`` is not
            fulfilled.
        """
        return (
            (not self.never_hit or (use is not None and not use.reused))
            and (self.made_before is None or manifest.created < self.made_before)
            and (self.made_after is None or manifest.created > self.made_after)
            and (
                self.more_bytes_than is None
                or manifest.raw_bytes > self.more_bytes_than
            )
            and (
                self.fewer_bytes_than is None
                or manifest.raw_bytes < self.fewer_bytes_than
            )
            and all(
                name in manifest.labels and value in (None, manifest.labels[name])
                for name, value in self.labels
            )
        )


def _label(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigurationError("--label", text, "NAME or NAME=VALUE")
    return name, value if equals else None


def chosen_namespaces(
    backend: Backend, wanted: str | None, otherwise: str = ""
) -> list[Namespace]:
    """Return the only namespace whose id begins with ``wanted``, in a list; None: all namespaces,
    oldest first.

    :param otherwise: continues the error that no namespace matches.
    """
    found = sorted(
        backend.namespaces(), key=lambda namespace: (namespace.created, namespace.id)
    )
    if wanted is None:
        return found
    matching = [
        namespace
        for namespace in found
        if namespace.id.hex().startswith(wanted.lower())
    ]
    if not wanted or len(matching) != 1:
        ids = _some(namespace.id.hex() for namespace in (matching or found))
        problem = "is ambiguous" if len(matching) > 1 else f"does not exist{otherwise}"
        raise NotFoundError(f"namespace {wanted!r} {problem}; namespaces: {ids}")
    return matching


def find_request(
    backend: Backend, wanted: str, namespace: str | None = None
) -> FoundRequest:
    """Return the request with this id, or else the only one with this short id or an id that begins
    with ``wanted``.

    :param namespace: id of the only namespace to search, or its first digits; None: search all.
    :raises NotFoundError: no request matches, or more than one.
    """
    similar = [
        FoundRequest(space, manifest)
        for space in chosen_namespaces(backend, namespace)
        for manifest in backend.catalogue(space.id).manifests()
        if manifest.id.startswith(wanted) or short_id(manifest.id) == wanted
    ]
    candidates = [found for found in similar if found.manifest.id == wanted] or similar
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise NotFoundError(
            f"no request has the id {wanted!r}; persistkv ls lists the ids"
        )
    meant = _some(
        f"{found.manifest.id} (namespace {found.namespace.id.hex()[:8]})"
        for found in candidates
    )
    raise NotFoundError(f"{wanted!r} matches {len(candidates)} requests: {meant}")


def chosen_requests(
    backend: Backend, names: Iterable[str], selection: Selection, namespace: str | None
) -> list[FoundRequest]:
    """Return the requests with these ids, each once; without ids, all requests that fulfil
    ``selection``.

    The use of requests is not read: a selection with ``never_hit`` selects none.

    :raises NotFoundError: an id matches no request, or more than one.
    """
    found = [find_request(backend, name, namespace) for name in names]
    if found:
        return list(
            {(one.namespace.id, one.manifest.id): one for one in found}.values()
        )
    return [
        FoundRequest(space, manifest)
        for space in chosen_namespaces(backend, namespace)
        for manifest in backend.catalogue(space.id).manifests()
        if selection.takes(manifest)
    ]


def with_uses(
    backend: Backend, namespace: bytes, manifests: Iterable[RequestManifest]
) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
    """Yield the manifests with their use, read in batches; None for an unknown use."""
    waiting = iter(manifests)
    while some := list(islice(waiting, _AT_ONCE)):
        yield from zip(
            some,
            backend.catalogue(namespace).uses([manifest.id for manifest in some]),
            strict=True,
        )


def row(
    request: RequestManifest | RequestView,
) -> tuple[bytes | str, frozenset[tuple[str, str]]]:
    """Return the context digest (or, if it is unknown, the request id) and the labels of a request.

    Requests of one namespace with equal results are copies, which lists show as one row.
    """
    return request.context or request.id, frozenset(request.labels.items())


def _some(names: Iterator[str]) -> str:
    found = sorted(names)
    more = (
        f" and {len(found) - _NAMED_AT_MOST} more"
        if len(found) > _NAMED_AT_MOST
        else ""
    )
    return (", ".join(found[:_NAMED_AT_MOST]) or "none") + more
