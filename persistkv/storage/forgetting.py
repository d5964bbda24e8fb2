"""Result of the forgetting of a tenant, and its receipt.

A receipt is JSON. Its signature is an HMAC with a key that is derived from the data key of the
store: only a process that can open the store can write or verify one. A store without a key signs
nothing: its receipt is a note, not evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from persistkv.errors import ConfigurationError
from persistkv.storage.format.seal import Seal

RECEIPT_VERSION = 1
# ``Receipt.out_of_reach`` of a store with a key
_KEYED_OUT_OF_REACH = (
    "a holder of both the user's key and a copy of the wrapped data keys from before can read "
    "copies of the content: backups, snapshots, and states of the medium that it keeps itself",
    "the memory of running engines: they drop the data key within a minute, and their KV blocks "
    "when they need the room",
    "logs, metrics, statuses and savings, which may contain ids and labels of requests",
)
# ``Receipt.out_of_reach`` of a store without a key
_PLAIN_OUT_OF_REACH = (
    "no key encrypted the content: copies, backups, snapshots and unused space of the medium may "
    "hold it",
    "requests of the tenant that engines had accepted before may be stored after it: stop them "
    "first, or repeat the command",
    # without the first sentence, which is about keys
    *_KEYED_OUT_OF_REACH[1:],
)


@dataclass(frozen=True)
class Forgotten:
    """Content and keys that ``Backend.forget`` has destroyed."""

    tenant: str
    time: float
    """End of the call: seconds since the epoch; in a shared store, on the medium's clock."""
    key_ids: tuple[str, ...]
    """Ids of the destroyed data keys, hexadecimal."""
    packs: int
    requests: int
    stored_bytes: int
    """Bytes of the packs' payloads, padding included."""
    out_of_reach: tuple[str, ...] = ()
    """What the medium has kept, in sentences."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt of a ``Forgotten``."""

    version: int
    tenant: str
    store: str
    """URL of the store, without options."""
    time: float
    key_ids: tuple[str, ...]
    packs: int
    requests: int
    stored_bytes: int
    out_of_reach: tuple[str, ...]
    """Copies that the command cannot destroy, in sentences."""
    signature: str = ""
    """Hexadecimal; empty: the store has no key."""

    def encode(self) -> bytes:
        """Return the receipt as JSON."""
        return msgspec.json.encode(self)

    @property
    def signed(self) -> bytes:
        """The JSON that the signature covers: all fields but itself."""
        unsigned = msgspec.structs.replace(self, signature="")
        return msgspec.json.encode(unsigned, order="sorted")


def make_receipt(
    forgotten: Forgotten,
    store: str,
    seal: Seal,
) -> Receipt:
    """Return a signed receipt; without a signature if the store has no key.

    :param store: URL of the store, without options.
    :param seal: of the store.
    """
    reach = _KEYED_OUT_OF_REACH if seal.encrypts else _PLAIN_OUT_OF_REACH
    receipt = Receipt(
        version=RECEIPT_VERSION,
        tenant=forgotten.tenant,
        store=store,
        time=forgotten.time,
        key_ids=forgotten.key_ids,
        packs=forgotten.packs,
        requests=forgotten.requests,
        stored_bytes=forgotten.stored_bytes,
        out_of_reach=(*forgotten.out_of_reach, *reach),
    )
    signature = seal.signature(receipt.signed)
    return msgspec.structs.replace(receipt, signature=signature.hex())


def parse_receipt(data: bytes) -> Receipt:
    """Return the receipt in a JSON document.

    :raises ConfigurationError: it is none, or of a newer release.
    """
    try:
        receipt = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError("receipt", str(error), "one of `forget`") from None
    if receipt.version != RECEIPT_VERSION:
        expected = f"version {RECEIPT_VERSION}"
        raise ConfigurationError("receipt", f"version {receipt.version}", expected)
    return receipt


def is_genuine(receipt: Receipt, seal: Seal) -> bool:
    """Return whether a store with this seal has signed a receipt, and it is unchanged."""
    try:
        signature = bytes.fromhex(receipt.signature)
    except ValueError:
        return False
    return seal.is_signature(receipt.signed, signature)


_DECODER = msgspec.json.Decoder(Receipt)
