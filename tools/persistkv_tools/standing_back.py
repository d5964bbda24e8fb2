"""How a command makes way for the engines of its machine. Imported before anything that costs.

1. Who only looks stands back. Who writes does not: it holds locks that engines wait for, and would hold them for long
   where it is seldom its turn.
2. Standing back is slower, never endless. Under SCHED_IDLE, where others take all processors, ``ls`` takes ten times as
   long, and whoever is not let on holds a snapshot meanwhile, which keeps what engines delete from being used again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_LOOKING = frozenset({"ls", "stat", "show", "top", "report", "verify", "why", "doctor", "serve-metrics"})
_WRITES = "--repair"
_LOOKS = "--dry-run"
_NICENESS = 10  # a tenth of what an engine gets where both want the same processor


def stand_back(arguments: Sequence[str]) -> None:
    """Where the command only looks, take what others leave, for as long as this process and its children live.

    :param arguments: of the command line, its command first.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads, which no command needs, take 0.1 s to start
    if _LOOKS in arguments or (_LOOKING.intersection(arguments[:1]) and _WRITES not in arguments):
        os.nice(_NICENESS)
