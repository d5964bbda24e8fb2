"""Print what LMCache requires on a CPU: its requirements without packages for GPUs and for other
stores."""

from __future__ import annotations

import sys
from importlib.metadata import requires

_LEFT_OUT = ("cufile-python", "cupy-", "cuda-python", "google-", "torch")
_TELEMETRY = "opentelemetry-"


def main() -> None:
    for requirement in requires("lmcache") or []:
        if requirement.startswith(_LEFT_OUT) or "extra ==" in requirement:
            continue
        line = requirement
        # releases after 1.40 lack a class that LMCache 0.5.6 imports
        if requirement.startswith(_TELEMETRY) and "<" not in requirement:
            line = f"{requirement},<=1.40.0"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
