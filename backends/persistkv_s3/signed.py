"""The index of one namespace: objects that are read as a whole, each with the tag of the store's key behind it."""

from __future__ import annotations

from collections.abc import Sequence

from persistkv.storage.codec import Buffer
from persistkv_s3.authentication import Authenticator
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.log.names import Names


class SignedObjects:
    """Used from any thread. Keys are those that ``names`` makes."""

    def __init__(self, bucket: Bucket, names: Names, namespace: bytes, authenticator: Authenticator) -> None:
        self.bucket = bucket
        self.names = names
        self.namespace = namespace
        self.authenticator = authenticator

    def put(self, key: str, pieces: Sequence[Buffer], *, only_if_absent: bool = True) -> None:
        """As ``Bucket.put``."""
        signed = self.authenticator.signed(self.namespace, key.removeprefix(self.names.base), pieces)
        self.bucket.put(key, signed, only_if_absent=only_if_absent)

    def get(self, key: str) -> memoryview:
        """As ``Bucket.get``, of something small.

        :raises CorruptPackError: it is too large, or not of anybody who has the key.
        """
        return self.opened(key, self.bucket.get(key))

    def opened(self, key: str, data: Buffer) -> memoryview:
        """What was put under a key, without its tag; errors as in ``get``."""
        return self.authenticator.opened(self.namespace, key.removeprefix(self.names.base), data)
