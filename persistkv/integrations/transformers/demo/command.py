"""``persistkv demo``. Importing this module imports no torch, so that help can be shown without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from persistkv.errors import MissingExtraError
from persistkv.integrations.transformers.demo.messages import ColdReport, WarmReport
from persistkv.integrations.transformers.demo.processes import run_process
from persistkv.integrations.transformers.demo.prompts import build_prompts
from persistkv.integrations.transformers.demo.report import DemoReport, build_report, print_report, write_chart
from persistkv.storage import open_inspectable
from persistkv.storage.format.codec import parse_codec

Tell = Callable[[str], None]

_DIRECTORY = Path(".persistkv-demo")
_CHART = Path("demo-report.png")
_PACKAGES = ("torch", "transformers", "safetensors")
_NOT_IDENTICAL = 1


def demo(
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where KV is kept; by default a new store under .persistkv-demo."),
    ] = None,
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="A checkpoint with byte-level tokens; made where there is none.")
    ] = _DIRECTORY / "model",
    tokens: Annotated[int, typer.Option(help="Tokens that all prompts share.")] = 4000,
    codec: Annotated[str, typer.Option(help="raw, zstd or planes; zstd:LEVEL, planes:WIDTH.")] = "raw",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else.")] = False,
) -> None:
    """Answer cold, be killed, and answer warm in a new process.

    Exit code 1: what was restored, or answered, is not identical to what it must be.
    """
    _require_packages()
    parse_codec(codec)
    build_prompts(tokens)
    url = _new_store() if store is None else store
    with closing(open_inspectable(url)):  # a wrong URL is told before minutes of work
        pass
    with _progress() as tell:
        report = _run(url, model, tokens, codec, tell)
    has_chart = write_chart(report, _CHART)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        _show(report, has_chart)
    if not report.good:
        raise typer.Exit(_NOT_IDENTICAL)


def _require_packages() -> None:
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "transformers")


def _new_store() -> str:
    """The demo's own store is begun anew each time, so that the table shows this run."""
    directory = (_DIRECTORY / "store").absolute()
    shutil.rmtree(directory, ignore_errors=True)
    return f"lmdb://{directory}?capacity=4GiB"


@contextmanager
def _progress() -> Iterator[Tell]:
    """On standard error: a changing line on a terminal, else a line for each thing that begins."""
    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(text: str) -> None:
            if console.is_terminal:
                status.update(text)
            else:
                console.print(text, markup=False, highlight=False)

        yield tell


def _run(url: str, model: Path, tokens: int, codec: str, tell: Tell) -> DemoReport:
    if not (model / "config.json").is_file():
        tell("making the model")
        from persistkv.integrations.transformers.demo.model import make_checkpoint  # imports torch

        make_checkpoint(model)
    cold = run_process(
        ColdReport, url, str(model), tokens, codec, lambda text: tell(f"first process: {text}"), kill=True
    )
    tell("the first process was killed (SIGKILL)")
    warm = run_process(
        WarmReport, url, str(model), tokens, codec, lambda text: tell(f"new process: {text}"), kill=False
    )
    with closing(open_inspectable(url, read_only=True)) as backend:
        stats = backend.stats()
    return build_report(cold, warm, stats, url=url, model=str(model), codec=codec, shared_tokens=tokens)


def _show(report: DemoReport, has_chart: bool) -> None:
    console = Console()
    print_report(report, console)
    chart = f"chart: {_CHART}" if has_chart else "no chart: pip install 'persistkv[report]'"
    console.print(chart, markup=False, highlight=False)
    console.print(f"$ persistkv ls '{report.url}'", markup=False, highlight=False)
    subprocess.run([sys.executable, "-m", "persistkv_tools", "ls", report.url], check=False)
