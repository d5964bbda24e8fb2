"""The word of shared memory between one worker and the engine's process."""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import suppress
from pathlib import Path

from persistkv.cpu.region_file import SHARED_MEMORY_DIRECTORY
from persistkv.integrations.vllm.regions import WEIGHTS_PREFIX

_WORD_BYTES = 4 * 8  # four numbers of 8 bytes


class WeightsWord:
    """Memory that one worker shares with the engine's process: four numbers, each written by one
    side only."""

    def __init__(self, file: int) -> None:
        """:param file: descriptor of the word's file; the caller closes it."""
        memory = mmap.mmap(file, _WORD_BYTES)
        self._numbers = memoryview(memory).cast("Q")
        """``asked``, ``answered``, ``epoch`` and ``changed``, of 8 bytes each."""

    @classmethod
    def create(
        cls,
        engine_id: str,
        rank: int,
        directory: str = SHARED_MEMORY_DIRECTORY,
    ) -> WeightsWord:
        """Create the word of a worker, in place of one that an earlier engine left.

        :raises OSError: the file cannot be created.
        """
        path = _path(engine_id, rank, directory)
        with suppress(FileNotFoundError):
            path.unlink()
        # O_EXCL and O_NOFOLLOW: open neither another user's file nor a link
        file = os.open(
            path,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        try:
            os.ftruncate(file, _WORD_BYTES)
            return cls(file)
        finally:
            os.close(file)

    @classmethod
    def attach(
        cls,
        engine_id: str,
        rank: int,
        directory: str = SHARED_MEMORY_DIRECTORY,
    ) -> WeightsWord:
        """Map the word that a worker of this engine has created, and remove its file.

        :raises OSError: there is none, or it is another user's.
        """
        path = _path(engine_id, rank, directory)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(file)
            is_own = status.st_uid == os.geteuid()
            if not is_own or status.st_size != _WORD_BYTES:
                raise PermissionError(f"{path} is not a file of this user's engine")
            word = cls(file)
        finally:
            os.close(file)
        # Remove the name; the mapping stays. Without a name, nothing is left if the engine is
        # killed.
        path.unlink()
        return word

    @property
    def asked(self) -> int:
        """Number of the engine's last request for a comparison. Written by the engine."""
        return self._numbers[0]

    @asked.setter
    def asked(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def answered(self) -> int:
        """Value of ``asked`` when the last comparison began. Written by the worker, after
        ``changed``."""
        return self._numbers[1]

    @answered.setter
    def answered(self, number: int) -> None:
        self._numbers[1] = number

    @property
    def epoch(self) -> int:
        """Number of weights that the engine has known. The first comparison in an epoch only takes
        the sample with which later ones compare. Written by the engine.
        """
        return self._numbers[2]

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._numbers[2] = number

    @property
    def changed(self) -> int:
        """One more than the last epoch in which the weights changed; 0: none. Written by the
        worker."""
        return self._numbers[3]

    @changed.setter
    def changed(self, number: int) -> None:
        self._numbers[3] = number


def _path(
    engine_id: str,
    rank: int,
    directory: str,
) -> Path:
    # an engine's id may have characters that a name of a file must not have
    digest = hashlib.blake2b(engine_id.encode(), digest_size=16)
    name = digest.hexdigest()
    return Path(directory) / f"{WEIGHTS_PREFIX}{name}_{rank}"
