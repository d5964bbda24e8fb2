"""What a request to an object store can end with. All are ``StoreError``s; the text never holds credentials."""

from __future__ import annotations

from persistkv.errors import StoreUnavailableError


class S3Error(StoreUnavailableError):
    """A request failed."""

    retryable = False
    """Whether the same request may succeed a moment later."""
    healthy = False
    """Whether the server is well all the same: it answered, and the answer was no fault of its own."""
    uncertain = False
    """Whether the server may have done what was asked."""
    pause_s = 0.0
    """How long the server asks to be left alone, at least."""


class ObjectMissingError(S3Error):
    """There is no such object."""

    healthy = True


class ObjectExistsError(S3Error):
    """A conditional PUT found an object in its place."""

    healthy = True


class RefusedError(S3Error):
    """The server does not allow it or does not understand it: credentials, policy, bucket, region."""


class BrokenError(S3Error):
    """The connection broke, or the server failed. A write may have been done."""

    retryable = True
    uncertain = True


class ThrottledError(S3Error):
    """The server asks for fewer requests. Nothing was done."""

    retryable = True
    pause_s = 0.5


class LateError(S3Error):
    """The deadline passed. A write may have been done."""

    uncertain = True


class BreakerOpenError(S3Error):
    """No request was made: the last ones failed or were slow."""

    healthy = True


PASSING = (BrokenError, ThrottledError, LateError, BreakerOpenError)
"""What says nothing of the bucket but that it does not answer now."""
