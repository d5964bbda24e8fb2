"""Recorded verdicts about namespaces of other engine releases."""

from __future__ import annotations

import msgspec

from persistkv.storage.backend import Backend
from persistkv.storage.identity.verdict import Verdict, verdicts
from persistkv.storage.inspection.requests import chosen_namespaces


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

    @classmethod
    def of(
        cls,
        ours: bytes,
        theirs: bytes,
        verdict: Verdict,
    ) -> AdoptionView:
        """Return the view of a verdict of namespace ``ours`` about ``theirs``."""
        fields = msgspec.structs.asdict(verdict)
        del fields["version"]
        return cls(ours=ours.hex(), theirs=theirs.hex(), **fields)


def adoptions(backend: Backend) -> list[AdoptionView]:
    """Return all recorded verdicts about namespaces of other engine releases."""
    found = verdicts(backend, chosen_namespaces(backend, wanted=None))
    return [
        AdoptionView.of(ours, theirs, verdict)
        for (ours, theirs), verdict in found.items()
    ]
