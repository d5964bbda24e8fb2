"""Requests and namespaces of a store: how they are named, found and shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from persistkv.batches import batched
from persistkv.errors import PersistKVError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.stats import RequestUse

_NAMED_AT_MOST = 5  # maximum number of ids in an error
_SHORT = 8  # minimum number of characters of an id in tables
_USES_PER_CALL = 256  # requests whose use is read with one call


class NotFoundError(PersistKVError):
    """No request or namespace of the store matches the given id, or several do."""


def short_ids(requests: Iterable[str]) -> dict[str, str]:
    """Return, for each of these ids, its shortest beginning of at least 8 characters with which no
    other of them begins."""
    # sort the ids, so that each is next to the one with which it shares the longest beginning
    ordered = sorted(set(requests))
    # Entry i is the number of characters that the ids i - 1 and i share; 0 at both ends, where an
    # id has no neighbour.
    shared = [0]
    for left, right in pairwise(ordered):
        shared.append(_shared_length(left, right))
    shared.append(0)
    short = {}
    for index, name in enumerate(ordered):
        longest_shared = max(shared[index], shared[index + 1])
        length = max(_SHORT, longest_shared + 1)
        short[name] = name[:length]
    return short


def _shared_length(left: str, right: str) -> int:
    """Return the number of characters at the start that both texts share."""
    length = min(len(left), len(right))
    for index in range(length):
        if left[index] != right[index]:
            return index
    return length


class NamespaceSummary(msgspec.Struct, frozen=True):
    """A namespace with its identity."""

    id: str
    """Id of the namespace: the digest of its identity, hexadecimal."""
    created: float
    """When the namespace was created: seconds since the epoch."""
    identity: dict[str, Any]
    model: str
    """Name or path of the model, as given by the engine that created the namespace; may be
    empty."""

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceSummary:
        """Return the view of a namespace."""
        identity = namespace.identity
        return cls(
            namespace.id.hex(),
            namespace.created,
            identity.properties,
            identity.model_name,
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
    """Number of blocks in each KV cache group."""
    raw_bytes: int
    """Bytes of the request's blocks before the codec, including blocks that other requests
    share."""
    ordered: bool
    """Whether the keys are in the order of the context; see ``RequestManifest``."""
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
    """Number of the ``shared_by`` requests that restored tokens later; None: unknown."""
    stored_bytes: int | None = None
    """Estimated size of the request's blocks in the store: ``raw_bytes`` divided by the codec ratio
    of its packs. None: unknown."""
    short_id: str = ""
    """Shortest beginning of the id, of at least 8 characters, with which no other id begins; the
    whole id if the ids of the other requests are not known."""
    context: str = ""
    """Digest of the request's keys, hexadecimal: equal for requests of the same context; empty:
    unknown."""
    copies: int = 1
    """Number of requests of the same context and labels that a list shows as this one, itself
    included."""
    ttl_s: float | None = None
    """The request's own ttl, in seconds from its last use; None: only the ttl of the store
    applies."""
    priority: str = "normal"
    """Priority of the request: ``low`` is evicted before ``normal``."""
    expires: float | None = None
    """When the request expires, unless it is used before: seconds since the epoch. In the past: it
    has expired, and the next commit deletes it. None: never, or unknown."""

    @classmethod
    def of(
        cls,
        namespace: bytes,
        manifest: RequestManifest,
        use: RequestUse | None,
        store_ttl_s: float | None = None,
        short_id: str = "",
    ) -> RequestView:
        """Return the view of a manifest head and of its use.

        :param use: use of the request; None: unknown.
        :param store_ttl_s: ttl of the store in seconds; None: the store has none.
        :param short_id: empty: the ids of the other requests are not known.
        """
        view = cls(
            id=manifest.id,
            namespace=namespace.hex(),
            created=manifest.created,
            tokens=manifest.tokens,
            blocks=manifest.blocks,
            group_blocks=manifest.group_blocks,
            raw_bytes=manifest.raw_bytes,
            ordered=manifest.ordered,
            labels=manifest.labels,
            short_id=short_id or manifest.id,
            context=manifest.context.hex(),
            ttl_s=manifest.ttl_s,
            priority=manifest.priority,
        )
        return view.with_use(use, store_ttl_s)

    def with_use(
        self,
        use: RequestUse | None,
        store_ttl_s: float | None,
    ) -> RequestView:
        """Return a copy with ``stored_bytes``, ``expires`` and the fields of the use set from
        ``use``. If ``use`` is None, return this view.

        :param store_ttl_s: ttl of the store in seconds; None: the store has none.
        """
        if use is None:
            return self
        stored = None
        # without packs, which may be deleted meanwhile, there is no ratio
        if use.packs_raw_bytes:
            ratio = use.packs_stored_bytes / use.packs_raw_bytes
            stored = round(self.raw_bytes * ratio)
        return msgspec.structs.replace(
            self,
            last_used=use.last_used,
            reused=use.reused,
            shared_by=use.shared_by,
            pinned=use.pinned,
            hits=use.hits,
            stored_bytes=stored,
            expires=use.expires(self.ttl_s, store_ttl_s),
        )


class FoundRequest(NamedTuple):
    """A request of a store, with its namespace."""

    namespace: Namespace
    manifest: RequestManifest
    short_id: str = ""
    """See ``RequestView.short_id``; empty: unknown."""

    def copies(self, backend: Backend) -> list[RequestManifest]:
        """Return the requests of the same context and labels, oldest first.

        :raises NotFoundError: this request was deleted meanwhile.
        """
        own = copy_group(self.manifest)
        found: list[RequestManifest] = []
        for manifest in backend.catalogue(self.namespace.id).manifests():
            if copy_group(manifest) == own:
                found.append(manifest)
        if not found:
            raise NotFoundError(f"{self.manifest.id} was deleted meanwhile")
        found.sort(key=attrgetter("created"))
        return found

    def keys(self, backend: Backend) -> ManifestKeys:
        """Return the keys; raise ``NotFoundError`` if the request was deleted meanwhile or its keys
        are unreadable."""
        request = self.manifest.id
        (keys,) = backend.manifest_keys(self.namespace.id, [request])
        if keys is None:
            raise NotFoundError(
                f"the keys of {request} were deleted or cannot be read; persistkv"
                " verify shows which"
            )
        return keys

    def view(self, backend: Backend) -> RequestView:
        """Return the view of the request, with its use."""
        catalogue = backend.catalogue(self.namespace.id)
        (use,) = catalogue.uses([self.manifest.id])
        ttl_s = backend.policy().ttl_s
        return RequestView.of(
            self.namespace.id,
            self.manifest,
            use,
            ttl_s,
            self.short_id,
        )


def chosen_namespaces(
    backend: Backend,
    wanted: str | None,
    otherwise: str = "",
) -> list[Namespace]:
    """Return the only namespace whose id begins with ``wanted``, in a list; None: all namespaces,
    oldest first.

    :param otherwise: text to append to the error that no namespace matches.
    :raises NotFoundError: no namespace matches, or more than one.
    """
    found = sorted(backend.namespaces(), key=attrgetter("created", "id"))
    if wanted is None:
        return found
    prefix = wanted.lower()  # in lower case, because ids are hexadecimal
    matching = [space for space in found if space.id.hex().startswith(prefix)]
    if len(matching) > 1:
        raise _unknown_namespace(wanted, "is ambiguous", matching)
    # refuse an empty text even if there is only one namespace, because every id begins with it
    if not wanted or not matching:
        raise _unknown_namespace(wanted, f"does not exist{otherwise}", found)
    return matching


def _unknown_namespace(
    wanted: str,
    problem: str,
    candidates: Iterable[Namespace],
) -> NotFoundError:
    """Return the error that ``wanted`` chooses none of the candidates."""
    ids = _some(space.id.hex() for space in candidates)
    return NotFoundError(f"namespace {wanted!r} {problem}; namespaces: {ids}")


def request_ids(backend: Backend, namespace: bytes) -> list[str]:
    """Return the ids of the requests of a namespace."""
    manifests = backend.catalogue(namespace).manifests()
    return [manifest.id for manifest in manifests]


def stored_requests(
    backend: Backend,
    namespace: str | None = None,
) -> Iterator[FoundRequest]:
    """Yield the requests of the namespaces that ``chosen_namespaces`` returns."""
    for space in chosen_namespaces(backend, namespace):
        for manifest in backend.catalogue(space.id).manifests():
            yield FoundRequest(space, manifest)


def find_request(
    backend: Backend,
    wanted: str,
    namespace: str | None = None,
) -> FoundRequest:
    """Return the request with this id, or else the only one whose id begins with ``wanted``.

    :param namespace: id of the only namespace to search, or its first digits; None: search all.
    :raises NotFoundError: no request matches, or more than one.
    """
    names = []
    similar = []
    for found in stored_requests(backend, namespace):
        name = found.manifest.id
        names.append(name)
        if name.startswith(wanted):
            similar.append(found)
    # prefer the request whose whole id is ``wanted``, even if other ids begin with it
    equal = [found for found in similar if found.manifest.id == wanted]
    candidates = equal or similar
    if not candidates:
        raise NotFoundError(
            f"no request has the id {wanted!r}; persistkv ls lists the ids"
        )
    if len(candidates) == 1:
        found = candidates[0]
        shorts = short_ids(names)
        return found._replace(short_id=shorts[found.manifest.id])
    raise _ambiguous_request(wanted, candidates)


def _ambiguous_request(
    wanted: str,
    candidates: Sequence[FoundRequest],
) -> NotFoundError:
    """Return the error that several requests match ``wanted``."""
    descriptions = []
    for found in candidates:
        namespace_id = found.namespace.id.hex()[:_SHORT]
        descriptions.append(f"{found.manifest.id} (namespace {namespace_id})")
    return NotFoundError(
        f"{wanted!r} matches {len(candidates)} requests: {_some(descriptions)}"
    )


def chosen_requests(
    backend: Backend,
    names: Iterable[str],
    selection: Selection,
    namespace: str | None,
) -> list[FoundRequest]:
    """Return the requests with these ids, each once; without ids, all requests that fulfil
    ``selection``.

    This does not read when requests were last used, because that costs several reads for each. So
    ``never_hit`` and ``expired``, the two conditions that depend on it, are fulfilled by no
    request: a selection with one of them selects nothing.

    :raises NotFoundError: an id matches no request, or more than one.
    """
    # use the whole ids as keys, because two of the names may be beginnings of the same id
    named = {}
    for name in names:
        found = find_request(backend, name, namespace)
        named[found.namespace.id, found.manifest.id] = found
    if named:
        return list(named.values())
    stored = stored_requests(backend, namespace)
    return [found for found in stored if selection.takes(found.manifest)]


def with_uses(
    backend: Backend,
    namespace: bytes,
    manifests: Iterable[RequestManifest],
    *,
    needed: bool = True,
) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
    """Yield the manifests with their use, read in batches; None for an unknown use.

    :param needed: False: read no use, and yield None for all. A use costs several reads.
    """
    if not needed:
        yield from zip(manifests, repeat(None))
        return
    for batch in batched(manifests, _USES_PER_CALL):
        names = [manifest.id for manifest in batch]
        uses = backend.catalogue(namespace).uses(names)
        yield from zip(batch, uses, strict=True)


def copy_group(
    request: RequestManifest | RequestView,
) -> tuple[bytes | str, frozenset[tuple[str, str]]]:
    """Return the context digest (or, if it is unknown, the request id) and the labels of a request.

    Requests of one namespace with equal results are copies, which lists show as one.
    """
    return request.context or request.id, frozenset(request.labels.items())


def _some(names: Iterable[str]) -> str:
    """Return the first names as text, and the number of further names."""
    found = sorted(names)
    text = ", ".join(found[:_NAMED_AT_MOST]) or "none"
    if len(found) > _NAMED_AT_MOST:
        text += f" and {len(found) - _NAMED_AT_MOST} more"
    return text
