"""``persistkv.open_store``: a store for programs, with the operations of the command line as
methods.

Each operation is implemented in the module of its command, which is imported when the operation is
first called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from persistkv.config import parse_size, store_url
from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv_tools.options import (
    RequestView,
    Selection,
    chosen_namespaces,
    find_request,
)

if TYPE_CHECKING:
    from persistkv_tools.inspect.ls import NamespaceView, Page, Sort
    from persistkv_tools.inspect.stat import StoreTotals
    from persistkv_tools.maintain.prune import Prune
    from persistkv_tools.maintain.verify import Repaired, RepairPlan, Summary
    from persistkv_tools.packs import Finding

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

    Requests and namespaces are named by their ids or the first characters of these;
    ``NotFoundError`` is raised if none or several match. Every method raises ``StoreError`` if the
    medium fails; its earlier commits stay in effect.

    :ivar url: the URL of the store.
    """

    def __init__(self, url: str, *, read_only: bool = True) -> None:
        """Open the store. Programs call ``open_store`` instead."""
        self.url = url
        self._read_only = read_only
        self._resources = ExitStack()
        self._reader = self._resources.enter_context(
            closing(open_backend(url, read_only=True))
        )
        self._writer: Backend | None = None

    @property
    def backend(self) -> Backend:
        """Backend of the store, for operations without a method here. It is read-only until a
        method has written."""
        return self._writer or self._reader

    # Inspection

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
        :param limit: requests to return; None: all.
        :param merge_copies: return one of the requests with the same context and labels, with their
            number.
        """
        from persistkv_tools.inspect.ls import Sort, list_requests

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

    def namespaces(self) -> list[NamespaceView]:
        """Return the namespaces of the store with their identities, oldest first."""
        from persistkv_tools.inspect.ls import NamespaceView

        return [
            NamespaceView.of(namespace)
            for namespace in chosen_namespaces(self.backend, None)
        ]

    def stats(self) -> StoreTotals:
        """Return totals of the store and of each namespace. Reads all pack tables and manifest
        heads, no payloads."""
        from persistkv_tools.inspect.stat import store_totals

        return store_totals(self.url, self.backend)

    def verify(
        self,
        *,
        sample: float = 1.0,
        rate: str | None = None,
        resume: Path | None = None,
        progress: Progress | None = None,
    ) -> Summary:
        """Read the store and check every byte. If engines use it and ``rate`` is None, reads 5 % of
        the time at most.

        :param sample: random share of the packs to read, above 0 and up to 1.
        :param rate: bytes to read in a second at most, e.g. ``200MiB``.
        :param resume: file of the progress. A run that was interrupted resumes from it; the caller
            deletes it.
        :param progress: display that shows the progress.
        :raises ConfigurationError: the sample or rate is invalid, or the file is of another run or
            cannot be written.
        """
        from persistkv_tools.maintain.verify import check_store

        bytes_per_s = None if rate is None else parse_size(rate, name="rate")
        return check_store(
            self.url, self.backend, sample, bytes_per_s, resume, progress
        )

    # Changes

    def plan_repair(self, findings: Iterable[Finding]) -> RepairPlan:
        """Return the packs that ``repair`` would delete, and the requests that it would shorten."""
        from persistkv_tools.maintain.verify import plan_repair

        return plan_repair(self.backend, findings)

    def repair(
        self, findings: Iterable[Finding], done: Repaired | None = None
    ) -> Repaired:
        """Delete packs that ``verify`` found bad and that are still bad; requests keep the blocks
        before these.

        :param done: updated by each commit, and returned.
        """
        from persistkv_tools.maintain.verify import Repaired, repair_packs

        done = Repaired() if done is None else done
        repair_packs(self._writable(), findings, done)
        return done

    def prune(
        self,
        selection: Selection | None = None,
        *,
        requests: Iterable[str] = (),
        namespace: str | None = None,
        keep_size: int | str | None = None,
        orphans: bool = False,
        shared_packs: bool = False,
        quarantined: bool = False,
        dry_run: bool = False,
    ) -> Prune:
        """Delete requests and the packs that only they use.

        :param selection: requests to delete; ``Selection()``: all; None: none, or those named in
            ``requests``.
        :param requests: ids; delete only these requests and their copies, if they fulfil
            ``selection``.
        :param keep_size: delete only as many requests as needed, oldest first, until packs take at
            most this size.
        :param orphans: also delete packs that no request names.
        :param shared_packs: also delete packs that other requests use, if only deleted requests
            name some of their blocks. The other requests that use these packs are deleted, too.
        :param quarantined: also delete the files of damaged stores that were renamed.
        :param dry_run: only plan; ``run`` of the result deletes.
        :returns: the plan, and in ``done`` its outcome.
        :raises ConfigurationError: the size is invalid; nothing was deleted.
        """
        from persistkv_tools.maintain.prune import Prune

        keep_bytes = (
            None if keep_size is None else parse_size(keep_size, name="keep_size")
        )
        found = [find_request(self.backend, name, namespace) for name in requests]
        prune = Prune(
            self.backend,
            self._writable,
            selection,
            chosen_namespaces(self.backend, namespace),
            found,
            keep_bytes,
            orphans=orphans,
            shared_packs=shared_packs,
            quarantined=quarantined,
        )
        if not dry_run:
            prune.run()
        return prune

    def pin(
        self, request: str, *, namespace: str | None = None, pinned: bool = True
    ) -> RequestView:
        """Pin a request or unpin it; return the request. A pinned request and its packs are not
        evicted, and expire only by the request's own ttl.

        :param pinned: False: unpin.
        """
        found = find_request(self.backend, request, namespace)
        self._writable().commit(
            found.namespace.id, CommitBatch(pins=[(found.manifest.id, pinned)])
        )
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
        from persistkv_tools.maintain.label import relabel

        found = find_request(self.backend, request, namespace)
        relabel(self._writable(), found, labels or {}, set(remove))
        return find_request(
            self.backend, found.manifest.id, found.namespace.id.hex()
        ).view(self.backend)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._resources.close()

    def __enter__(self) -> StoreHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _writable(self) -> Backend:
        if self._read_only:
            raise StoreError(
                f"{self.url} is open read-only: open it with read_only=False"
            )
        if self._writer is None:
            self._writer = self._resources.enter_context(
                closing(open_backend(self.url))
            )
        return self._writer
