"""Credentials of requests, found and renewed within the deadline of a call.

1. boto3's sources (environment, files, STS, metadata servers, programs) have timeouts of minutes or
   none. So they run in a thread of their own, which is abandoned if it does not end.
2. Credentials that are still valid are used while they are renewed: a hung source delays no
   request.
3. Each search is independent of an abandoned one, and shares no lock with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from persistkv_s3.client.transport import Deadline, LateError, NoCredentialsError

logger = logging.getLogger(__name__)

# remaining seconds of validity below which credentials are renewed, as in botocore
_RENEW_S = 15 * 60
# remaining seconds of validity below which a request waits for new credentials
_VALID_S = 60
PAUSE_S = 60  # seconds between two searches while the credentials are valid
# seconds after which another search starts although the last one has not ended
ABANDON_S = 60


class DeferredCredentials:
    """Credentials for a botocore client, which are searched for before a request instead of when it
    is signed. Thread-safe.

    :param find: returns botocore's credentials; None: there are none. Called in another thread, at
        most once per minute while it does not return.
    """

    method = "persistkv"  # name of the credentials' source, which botocore reads

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._found: Any = None
        """Credentials of botocore, which know when they expire; None: none were found yet."""
        self._frozen: Any = None
        """Values of ``_found`` (access key, secret, token) with which botocore signs requests."""
        self._search: Future[None] | None = None
        """The last search, running or ended; None: there was none."""
        self._search_began = 0.0
        """``time.monotonic`` time of its start."""

    def ensure(self, deadline: Deadline, what: str) -> None:
        """Return when the credentials are valid. The error of a search passes unchanged.

        :param what: names the operation in an error.
        :raises LateError: the search did not end by the deadline.
        :raises NoCredentialsError: there are none.
        """
        search = self._awaited_search(what)
        if search is None:
            return
        wait([search], timeout=max(0.0, deadline.remaining))
        if not search.done():
            raise LateError(
                f"{what}: the source of credentials does not answer within {deadline.seconds:g} s"
            )
        # this raises the error of a search that failed
        search.result()

    def _awaited_search(self, what: str) -> Future[None] | None:
        """Start a search if one is due; return the one that a request must wait for, or None."""
        with self._lock:
            if self._are_valid_for(_RENEW_S):
                return None
            # while the present credentials are valid for longer than this, requests use them during
            # a renewal
            usable = self._are_valid_for(_VALID_S)
            if self._is_search_due(usable=usable):
                self._start_search(what, usable=usable)
            return None if usable else self._search

    def _are_valid_for(self, seconds: float) -> bool:
        """Return whether there are credentials that stay valid for so many seconds."""
        if self._found is None:
            return False
        # credentials without this method, such as those of a file, never expire
        expires_within = getattr(self._found, "refresh_needed", None)
        return expires_within is None or not expires_within(seconds)

    def _is_search_due(self, *, usable: bool) -> bool:
        """Return whether to search now, in place of a search that has ended or hangs.

        :param usable: whether the present credentials can still be used: then a search that has
            ended is repeated after a pause only.
        """
        if self._search is None:
            return True
        age = time.monotonic() - self._search_began
        if not self._search.done():
            return age >= ABANDON_S
        return not usable or age >= PAUSE_S

    def _start_search(self, what: str, *, usable: bool) -> None:
        """Search in a daemon thread: a metadata server may not answer.

        :param what: names the request for which they are searched, in an error.
        :param usable: whether the present credentials can be used meanwhile.
        """
        search = Future[None]()
        self._search = search
        self._search_began = time.monotonic()
        thread = threading.Thread(
            target=self._run_search,
            args=(search, what, usable),
            name="persistkv-s3-credentials",
            daemon=True,
        )
        thread.start()

    def _run_search(
        self,
        search: Future[None],
        what: str,
        usable: bool,
    ) -> None:
        """Search for credentials, and set the result of the search.

        :param what: names the request for which they are searched, in an error.
        :param usable: whether requests use the present credentials meanwhile.
        """
        try:
            found = self._find()
            if found is None:
                text = "no credentials; they come from the environment, a profile or a role"
                raise NoCredentialsError(f"{what}: {text}")
            frozen = found.get_frozen_credentials()
        except BaseException as error:
            # no request waits for this search, so its error would be lost
            if usable:
                text = (
                    "credentials cannot be renewed (%s): the present ones are used until "
                    "they expire"
                )
                logger.warning(text, type(error).__name__)
            search.set_exception(error)
            return
        with self._lock:
            self._found = found
            self._frozen = frozen
        search.set_result(None)

    def get_frozen_credentials(self) -> Any:
        """Return the credentials with which botocore signs a request."""
        return self._frozen

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        """Return a function that botocore calls for a property of the credentials, such as
        ``account_id``."""
        return lambda: getattr(self._frozen, name, None)
