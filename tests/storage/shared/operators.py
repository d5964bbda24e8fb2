"""An operator of the medium who makes mistakes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.shared import format
from tests.storage.shared.model import (
    NAMESPACES,
    decode,
    indexes,
    names_of,
    newer,
    seals_of,
)
from tests.storage.shared.simulation import START

if TYPE_CHECKING:
    from tests.storage.shared.history import History


class Operator:
    """Mistakes of the people who have access to the medium."""

    def __init__(self, history: History, draw: random.Random) -> None:
        self._history = history
        self._draw = draw
        self.junk: set[str] = set()
        """Names of blobs that no engine has written in this way. Some prevent a sweep."""

    def act(self) -> None:
        """Do one of the mistakes."""
        mistake = self._draw.choice(
            (self._delete, self._delete, self._garble, self._restore, self._add_junk)
        )
        mistake()

    def _choose(self) -> list[str]:
        medium = self._history.world.medium
        part = self._draw.choice(
            ("/index/", "/inbox/", "/packs/", "/latest", "totals/", "policy")
        )
        names = medium.names(part)
        return self._draw.sample(names, min(len(names), self._draw.randrange(1, 3)))

    def _delete(self) -> None:
        names = self._choose()
        for name in names:
            self._damage(name)
        self._note("deletes", *names)
        self._history.world.medium.delete(names)

    def _garble(self) -> None:
        medium = self._history.world.medium
        for name in self._choose()[:1]:
            self._damage(name)
            self._note("garbles", name)
            length = self._draw.choice((0, 10, len(medium.blobs[name].data)))
            medium.deleted[name] = medium.blobs[name].data
            medium.put(name, self._draw.randbytes(length))
            self.junk.add(name)

    def _restore(self) -> None:
        """Replace a blob that is written again and again by an older version."""
        medium = self._history.world.medium
        names = [name for name in sorted(medium.replaced) if "/packs/" not in name]
        for name in names[:1]:
            self._note("restores an old version of", name)
            medium.put(name, self._draw.choice(medium.replaced[name]))

    def _add_junk(self) -> None:
        namespace = self._draw.choice(NAMESPACES)
        names = names_of(namespace, with_key=self._history.has_key)
        name = self._draw.choice(
            (names.new_commit(self._draw), names.new_index(1, START, self._draw))
        )
        if self._draw.random() < 0.3:
            name += "-junk"
        data = self._draw.choice((self._draw.randbytes(50), newer(name, namespace)))
        self._note("adds", name)
        self._history.world.medium.put(name, data)
        self.junk.add(name)

    def _damage(self, name: str) -> None:
        """Record what may be missed when this blob is gone."""
        model, world = self._history.model, self._history.world
        for _, names in indexes():
            blob = names.pack_name(name)
            if blob is not None:
                model.damaged.add(blob[:ID_BYTES])
        delta = decode(name, world.medium.blobs[name].data, seals_of(world))
        if delta is not None:
            model.damaged.update(entry.pack_id for entry in delta.packs)
            # they may return
            model.damaged.update(
                tombstone.name[:ID_BYTES] for tombstone in delta.removed
            )
            for entry in delta.manifests:
                model.damaged.update(format.split_ids(entry.packs))

    def _note(self, does: str, *names: str) -> None:
        if names:
            self._history.world.note(f"OPERATOR {does} {', '.join(names)}")
