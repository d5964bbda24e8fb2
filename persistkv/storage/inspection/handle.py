"""``persistkv.open_store``: a store for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from persistkv.config import store_url, without_options
from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.forgetting import (
    Receipt,
    is_genuine,
    make_receipt,
    parse_receipt,
)
from persistkv.storage.inspection.labels import relabel
from persistkv.storage.inspection.listing import Page, Sort, list_requests
from persistkv.storage.inspection.requests import (
    NamespaceSummary,
    RequestView,
    chosen_namespaces,
    find_request,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.inspection.store_totals import StoreTotals, store_totals

_ALL = Selection()


def open_store(url: str | Path, *, read_only: bool = True) -> StoreHandle:
    """Open an existing store. Engines may use it meanwhile.

    :param url: URL of the store, such as ``lmdb:///var/cache/kv``, or the path of an LMDB store.
    :param read_only: methods that change the store raise ``StoreError``.
    :raises ConfigurationError: the URL is invalid, or its driver cannot list requests.
    :raises StoreUnavailableError: there is no store, or it cannot be reached.
    """
    return StoreHandle(store_url(url), read_only=read_only)


class StoreHandle:
    """An open store. Must be closed, or used in a ``with`` statement. For use from one thread only.

    Requests and namespaces are named by their ids or the first characters of their ids;
    ``NotFoundError`` is raised if none or several match. Every method raises ``StoreError`` if the
    medium fails; commits that the method has made before stay in effect.

    :ivar url: the URL of the store.
    """

    def __init__(self, url: str, *, read_only: bool = True) -> None:
        """Open the store. Programs call ``open_store`` instead."""
        self.url = url
        self._read_only = read_only
        self._resources = ExitStack()
        """Closes the open backends."""
        # open for reading first: this creates no absent store, and most uses never write
        backend = open_backend(url, read_only=True)
        self._reader = self._resources.enter_context(closing(backend))
        self._writer: Backend | None = None
        """Backend that ``writable`` has opened; None: not yet."""

    @property
    def backend(self) -> Backend:
        """Backend of the store, for operations without a method here. It is read-only until
        ``writable`` was called."""
        return self._writer or self._reader

    def writable(self) -> Backend:
        """Return the backend of the store, open for writing.

        :raises StoreError: the store was opened read-only, or cannot be opened for writing.
        """
        if self._read_only:
            raise StoreError(
                f"{self.url} is open read-only: open it with read_only=False"
            )
        # keep the reader open, because callers may have got it from ``backend``
        if self._writer is None:
            backend = open_backend(self.url)
            self._writer = self._resources.enter_context(closing(backend))
        return self._writer

    def requests(
        self,
        selection: Selection = _ALL,
        *,
        namespace: str | None = None,
        sort: Sort | str = "created",
        reverse: bool = False,
        offset: int = 0,
        limit: int | None = None,
        merge_copies: bool = False,
    ) -> Page:
        """Return stored requests, the newest or largest first, and the store's namespaces.

        :param sort: ``created``, ``used``, ``tokens``, ``blocks``, ``size``, ``hits``, ``id`` or
            ``namespace``.
        :param offset: requests to skip.
        :param limit: maximum number of requests to return; None: all.
        :param merge_copies: return only one of several requests with the same context and labels,
            with their number.
        """
        return list_requests(
            self.url,
            self.backend,
            selection,
            namespace=namespace,
            sort=Sort(sort),
            reverse=reverse,
            offset=offset,
            limit=limit,
            merge_copies=merge_copies,
        )

    def namespaces(self) -> list[NamespaceSummary]:
        """Return the namespaces of the store with their identities, oldest first."""
        spaces = chosen_namespaces(self.backend, wanted=None)
        return [NamespaceSummary.of(space) for space in spaces]

    def stats(self) -> StoreTotals:
        """Return totals of the store and of each namespace. Reads all pack tables and manifest
        heads, no payloads."""
        return store_totals(self.url, self.backend)

    def pin(
        self,
        request: str,
        *,
        namespace: str | None = None,
        pinned: bool = True,
    ) -> RequestView:
        """Pin a request or unpin it; return the request. A pinned request and its packs are not
        evicted, and expire only by the request's own ttl.

        :param pinned: False: unpin.
        """
        found = find_request(self.backend, request, namespace)
        change = (found.manifest.id, pinned)
        batch = CommitBatch(pins=[change])
        self.writable().commit(found.namespace.id, batch)
        return found.view(self.backend)

    def label(
        self,
        request: str,
        labels: Mapping[str, str] | None = None,
        *,
        remove: Iterable[str] = (),
        namespace: str | None = None,
    ) -> RequestView:
        """Set labels of a request and remove others; return the request. This counts as a use of
        it."""
        found = find_request(self.backend, request, namespace)
        given = labels or {}
        relabel(self.writable(), found, given, set(remove))
        space = found.namespace.id.hex()
        # read the request again, because the change of its labels counts as a use
        changed = find_request(self.backend, found.manifest.id, space)
        return changed.view(self.backend)

    def forget(self, tenant: str) -> Receipt:
        """Destroy the content and the data keys of a tenant, as ``Backend.forget`` does; return a
        receipt, which is signed if the store has a key."""
        backend = self.writable()
        forgotten = backend.forget(tenant)
        place = without_options(self.url)
        return make_receipt(forgotten, place, backend.seal)

    def is_genuine(self, receipt: bytes) -> bool:
        """Return whether this store has signed a receipt, a JSON document, and it is unchanged.
        False without a key.

        :raises ConfigurationError: it is no receipt.
        """
        parsed = parse_receipt(receipt)
        return is_genuine(parsed, self.backend.seal)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._resources.close()

    def __enter__(self) -> StoreHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
