"""Queues of the kernel's asynchronous I/O that tell what they were asked."""

import pytest

from persistkv_lmdb import arriving
from persistkv_lmdb.kernel_aio import Queue, Read


class Watched(Queue):
    """Remembers the queues there were, and what was begun."""

    def __init__(self):
        super().__init__()
        self.begun: list[Read] = []
        self.closed = False
        self.opened.append(self)  # see ``use``

    def begin(self, read):
        super().begin(read)
        self.begun.append(read)

    def close(self):
        super().close()
        self.closed = True


def use(monkeypatch, queue_type):
    """Have stores use these queues; the list of those that there will be."""
    monkeypatch.setattr(queue_type, "opened", opened := [], raising=False)
    monkeypatch.setattr(arriving, "Queue", queue_type)
    return opened


def needs_aio(queues):
    if not any(queue.begun for queue in queues):
        pytest.skip("no asynchronous I/O past the page cache here")
