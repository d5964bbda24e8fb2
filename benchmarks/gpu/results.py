"""Figures that are written as soon as they are measured, so that an interrupted run keeps them.

``python -m benchmarks.gpu.results DIRECTORY`` prints the figures of a directory as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

FILE_NAME = "results.jsonl"


class Results:
    """Figures of one benchmark: one line of JSON and one line of text each, on disk before the next
    is measured.

    The first figure describes the machine.

    :param arguments: result of ``parse``. With ``--smoke``, targets are not checked.
    """

    def __init__(self, benchmark: str, arguments: argparse.Namespace) -> None:
        self._benchmark = benchmark
        self._smoke: bool = arguments.smoke
        self._directory: Path | None = arguments.out
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self.add("machine", **machine(arguments.device))

    def add(
        self,
        figure: str,
        ratio: float | None = None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        **values: Any,
    ) -> None:
        """Record one figure.

        :param ratio: ratio of two speeds or times of this run, if the figure is one.
        :param at_least: lower target of the ratio; ``at_most`` is an upper target.
        :param values: the inputs of the ratio, as JSON values.
        """
        target = None
        met: bool | None = None
        if ratio is not None and not self._smoke:
            if at_least is not None:
                target, met = f">= {at_least:g}", ratio >= at_least
            elif at_most is not None:
                target, met = f"<= {at_most:g}", ratio <= at_most
        record = {
            "benchmark": self._benchmark,
            "figure": figure,
            "ratio": ratio,
            "target": target,
            "met": met,
            "values": values,
        }
        self._append(FILE_NAME, json.dumps(record))
        line = f"{self._benchmark}: {figure}: " + ", ".join(
            part for part in (_ratio(record), _values(values)) if part
        )
        self._append("results.txt", line)
        print(line, flush=True)

    def _append(self, name: str, line: str) -> None:
        if self._directory is None:
            return
        with open(self._directory / name, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def parse(
    description: str,
    argv: Sequence[str] | None,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> argparse.Namespace:
    """Parse the options that all GPU benchmarks share, and those that ``add`` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes: runs the code, and the figures mean nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="directory where results.jsonl and results.txt are appended to",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where stores are made, on the disk to measure; default: temporary",
    )
    add(parser)
    arguments = parser.parse_args(argv)
    if arguments.device.type == "cuda" and arguments.device.index is None:
        arguments.device = torch.device("cuda", torch.cuda.current_device())
    return arguments


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine that the figures depend on."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
            "cuda": torch.version.cuda,
        }
    return facts


def show(directory: Path) -> None:
    """Print all figures of a directory, those with targets first."""
    path = directory / FILE_NAME
    records = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.is_file()
        else []
    )
    table = Table(title=f"{len(records)} figures in {path}")
    for column in ("benchmark", "figure", "ratio", "target", "met"):
        table.add_column(column)
    for record in sorted(records, key=lambda record: record["target"] is None):
        met = {None: "", True: "yes", False: "NO"}[record["met"]]
        ratio = "" if record["ratio"] is None else f"{record['ratio']:.3f}"
        table.add_row(
            record["benchmark"], record["figure"], ratio, record["target"] or "", met
        )
    Console(width=120).print(table)


def _ratio(record: dict[str, Any]) -> str:
    if record["ratio"] is None:
        return ""
    met = {
        None: "",
        True: f" ({record['target']}: met)",
        False: f" ({record['target']}: MISSED)",
    }[record["met"]]
    return f"ratio {record['ratio']:.3f}{met}"


def _values(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


if __name__ == "__main__":
    show(Path(sys.argv[1]))
