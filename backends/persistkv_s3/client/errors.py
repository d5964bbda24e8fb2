"""Errors of requests to an object store. All are ``StoreError``s; their text never contains credentials."""

from __future__ import annotations

from persistkv.errors import StoreUnavailableError


class S3Error(StoreUnavailableError):
    """A request failed."""

    retryable = False
    """Whether the same request may succeed if it is repeated."""
    healthy = False
    """Whether the server works although the request failed: it answered, and the error is not its fault."""
    uncertain = False
    """Whether the server may have carried out the request."""
    pause_s = 0.0
    """Minimum pause in seconds that the server requests."""


class ObjectMissingError(S3Error):
    """There is no such object."""

    healthy = True


class ObjectExistsError(S3Error):
    """A conditional PUT found an existing object."""

    healthy = True


class RefusedError(S3Error):
    """The server rejected the request: credentials, policy, bucket, region."""


class BrokenError(S3Error):
    """The connection broke, or the server failed. A write may have taken effect."""

    retryable = True
    uncertain = True


class ThrottledError(S3Error):
    """The server requests fewer requests. The request had no effect."""

    retryable = True
    pause_s = 0.5


class LateError(S3Error):
    """The deadline passed. A write may have taken effect."""

    uncertain = True


class BreakerOpenError(S3Error):
    """No request was made, because previous ones failed or were slow."""

    healthy = True


PASSING = (BrokenError, ThrottledError, LateError, BreakerOpenError)
"""Errors that only say that the server does not answer at present."""
