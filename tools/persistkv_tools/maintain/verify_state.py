"""How far a ``verify`` came, in a file, so that the next one goes on there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
import xxhash

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv_tools.pack_check import Finding

STATE_VERSION = 1


class VerifyState(msgspec.Struct, kw_only=True):
    """Where a run stands, and what it found so far. Packs are taken in the order of their ids."""

    version: int = STATE_VERSION
    store: str
    """Scheme and location."""
    share: float
    """Of packs to read."""
    salt: int
    """Draws the packs of the share: another one draws others."""
    after: str = ""
    """Namespace and pack that were done last, hexadecimal."""
    packs: int = 0
    """Read so far."""
    frames: int = 0
    stored_bytes: int = 0
    went: int = 0
    """Packs that were deleted or replaced by others while they were read."""
    other_release: int = 0
    """Packs of a codec that this release does not know."""
    findings: list[Finding] = []

    @classmethod
    def begin(cls, url: str, share: float) -> VerifyState:
        """Nothing is done yet."""
        return cls(store=_store(url), share=share, salt=secrets.randbits(32))

    @classmethod
    def load(cls, path: Path, url: str, share: float) -> VerifyState:
        """What the file says; a new state where there is none.

        :raises ConfigurationError: it does not read, or is of another run.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls.begin(url, share)
        except OSError as error:
            raise ConfigurationError("--resume", str(path), f"a readable file ({error.strerror})") from None
        try:
            state = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigurationError("--resume", str(path), f"a file that verify wrote ({error})") from None
        if (state.version, state.store, state.share) != (STATE_VERSION, _store(url), share):
            expected = f"the state of {_store(url)} with --sample {share:g}; it is of {state.store}, {state.share:g}"
            raise ConfigurationError("--resume", str(path), expected)
        return state

    def beside(self) -> VerifyState:
        """A count of what comes next, to be taken in once it is complete."""
        return VerifyState(store=self.store, share=self.share, salt=self.salt)

    def take(self, tally: VerifyState, after: str) -> None:
        """Add what was counted up to a pack."""
        self.after = after
        self.packs += tally.packs
        self.frames += tally.frames
        self.stored_bytes += tally.stored_bytes
        self.went += tally.went
        self.other_release += tally.other_release
        self.findings += tally.findings

    def save(self, path: Path) -> None:
        """Readers see the old file or the new one, whole.

        :raises ConfigurationError: it cannot be written.
        """
        beside = path.with_name(path.name + ".new")
        try:
            beside.write_bytes(msgspec.json.encode(self))
            os.replace(beside, path)
        except OSError as error:
            raise ConfigurationError("--resume", str(path), f"a place to write to ({error.strerror})") from None

    def draws(self, pack_id: bytes) -> bool:
        """Whether the pack belongs to the share."""
        return xxhash.xxh3_64_intdigest(pack_id, seed=self.salt) < self.share * 2**64


def _store(url: str) -> str:
    parsed = StoreUrl.parse(url)
    return f"{parsed.scheme}://{parsed.location}"
