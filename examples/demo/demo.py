"""A process answers prompts and is killed; the next process answers with restored KV.

``make demo`` runs it: ``python -m examples.demo.demo --help``. Importing this module imports no
torch, so that help can be shown without it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from contextlib import closing
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persistkv.errors import (
    ConfigurationError,
    MissingExtraError,
    PersistKVError,
    printable,
)
from persistkv.integrations.transformers.results import RequestStats
from persistkv.storage import open_backend
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.stats import BackendStats

FIRST = (
    "How does heapq keep its invariant when an item is pushed?",
    "Which exception does textwrap raise for a bad width?",
    "Why does bisect_right differ from bisect_left?",
)
"""Questions of the demo that both of its processes answer, and whose contexts the first one
stores."""
FURTHER = (
    "Show how wrap() treats words longer than the line.",
    "What does merge() cost for k inputs of n items?",
)
"""Questions that the first process answers without storing their contexts; the second process
answers them, too."""

_DIRECTORY = Path(".persistkv-demo")
_PACKAGES = ("torch", "transformers", "safetensors")
_WORKER = "examples.demo.demo_worker"
_NOT_IDENTICAL = 1
_FAILED = 2
_MIB = 1 << 20
_MODULES = (
    "textwrap heapq bisect queue shlex fnmatch csv sched string calendar argparse"
)
_MIN_TOKENS = 256
_QUESTION_TOKENS = 64


def demo(
    store: str | None,
    model: Path,
    tokens: int,
    codec: str,
    *,
    json: bool,
) -> None:
    """Answer prompts in one process, kill it, and answer them in a new process with restored KV.

    Exit code 1: restored pages, tokens or logits are not bit-identical; 2: an option is invalid, or
    a process failed.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "transformers")
    parse_codec(codec)
    build_prompts(tokens)
    if store is None:
        directory = (_DIRECTORY / "store").absolute()
        shutil.rmtree(directory, ignore_errors=True)  # the tables show this run only
        store = f"lmdb://{directory}?capacity=4GiB"
    with closing(open_backend(store)):  # an invalid URL fails before minutes of work
        pass
    report = _run(store, model, tokens, codec)
    if json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        sys.stdout.write(text.decode() + "\n")
    else:
        _print(report)
    same_answers = report.tokens_identical and report.logits_identical
    if not same_answers or not report.pages_identical:
        sys.exit(_NOT_IDENTICAL)


def _run(url: str, model: Path, tokens: int, codec: str) -> DemoReport:
    """Run both processes, one after the other, and return the comparison of their reports."""
    if not (model / "config.json").is_file():
        _log("creating the model")
        from examples.demo.demo_worker import make_checkpoint  # imports torch

        make_checkpoint(model)
    _log("first process:")
    cold_task = Task(True, url, str(model), tokens, codec, time.monotonic())
    cold = _run_process(cold_task)
    _log("the first process was killed (SIGKILL); new process:")
    warm_task = Task(False, url, str(model), tokens, codec, time.monotonic())
    warm = _run_process(warm_task)
    with closing(open_backend(url, read_only=True)) as backend:
        return _build_report(
            cold,
            warm,
            backend.stats(),
            url=url,
            model=str(model),
            codec=codec,
            shared_tokens=tokens,
        )


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _run_process(task: Task) -> Report:
    """Run a worker process and return its report. Kill it by SIGKILL after the report if
    ``task.is_cold``.

    :raises PersistKVError: if the process failed, or was to be killed and was not ended by the
        signal.
    """
    encoded_task = msgspec.json.encode(task).decode()
    command = [sys.executable, "-m", _WORKER, encoded_task]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            if task.is_cold:
                process.kill()
            code = process.wait()
        finally:
            process.kill()
    if not line.endswith(b"\n"):
        raise PersistKVError(f"the process ended with {code} before it reported")
    report = msgspec.json.decode(line, type=Report)
    if report.error:
        raise PersistKVError(report.error)
    expected_code = -signal.SIGKILL if task.is_cold else 0
    if code != expected_code:
        raise PersistKVError(f"the process ended with {code}")
    return report


def build_prompts(num_tokens: int) -> dict[str, list[int]]:
    """Return the tokens of each question's prompt: modules of the standard library, then the
    question.

    One byte is one token. All prompts share their first ``num_tokens`` tokens.

    :raises ConfigurationError: if ``num_tokens`` is below 256, or exceeds the length of the
        modules' text.
    """
    modules: list[bytes] = []
    for name in _MODULES.split():
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            title = f"# {name}.py\n".encode()
            modules.append(title + Path(spec.origin).read_bytes())
    text = b"\n".join(modules)
    if not _MIN_TOKENS <= num_tokens <= len(text):
        raise ConfigurationError("tokens", num_tokens, f"{_MIN_TOKENS} to {len(text)}")
    prompts: dict[str, list[int]] = {}
    for question in FIRST + FURTHER:
        # of one length, so that all prompts have whole blocks in common
        tail = f"\n# {question}\n".encode().ljust(_QUESTION_TOKENS, b"#")
        prompt = text[:num_tokens] + tail[:_QUESTION_TOKENS]
        prompts[question] = list(prompt)
    return prompts


class Task(msgspec.Struct, frozen=True):
    """Task of a worker process, passed as JSON in its only command line argument.

    ``url`` is the store's, ``model`` a checkpoint's directory, ``tokens`` the number of tokens that
    all prompts share.
    """

    is_cold: bool
    """Whether this is the first process, which computes its answers in full, and is killed after
    its report."""
    url: str
    model: str
    tokens: int
    codec: str
    started: float
    """Start of the worker process: seconds of the monotonic clock, read by the process that starts
    it."""


class Answer(msgspec.Struct, frozen=True):
    """One answered prompt."""

    question: str
    """Text of the question, as in ``build_prompts``."""
    tokens: list[int]
    """Ids of the generated tokens."""
    logits: list[float]
    """Logits from which the first generated token was chosen, one for each token of the
    vocabulary."""
    logits_digest: str
    """xxh3-128 checksum of the bytes of ``logits``, hexadecimal."""
    stats: RequestStats


class Report(msgspec.Struct, frozen=True):
    """Results of a worker process, written as one line of JSON on its standard output."""

    answers: list[Answer] = []
    """First process: answers to the questions ``FIRST``, computed in full. Second process: answers
    to all questions."""
    resident: list[Answer] = []
    """First process: answers to all questions, with the KV that computing ``answers`` left on the
    device."""
    pages: dict[str, str] = {}
    """Digests of device pages by block hash, both hexadecimal. First process: all published pages.
    Second process: the restored pages only."""
    start_to_first_token_s: float = 0.0
    """Seconds from the start of the process to the first token of its first answer."""
    notices: list[str] = []
    """Second process: ``Engine.notices``, messages of its store for the user. First process:
    empty."""
    error: str = ""
    """Why the process failed; empty if it did not."""


class RequestReport(msgspec.Struct, frozen=True):
    """One prompt with up to three answers: ``cold``, computed in full (None for some prompts);
    ``resident``, by the same process with the KV that its first run left on the device; ``warm``,
    with KV from the store in a new process.
    """

    question: str
    cold: RequestStats | None
    resident: RequestStats
    warm: RequestStats
    same_split: bool
    """Whether resident and warm run restored equally many tokens: only then can they be compared
    bit by bit."""
    tokens_identical: bool
    """Whether the warm run's tokens equal those of the resident run."""
    logits_identical: bool
    """Whether the warm run's logits of the first token equal those of the resident run."""
    agrees_with_cold: bool | None
    """Whether the warm run's tokens equal those of the cold run; None without a cold run. They may
    differ, because the cold run computed the prompt at once and so rounded differently."""
    max_logit_difference: float | None
    """Largest absolute difference between the cold and the warm run's logits; None without a cold
    run."""

    @property
    def has_same_tokens(self) -> bool:
        """Whether resident and warm run can be compared, and have the same tokens."""
        return self.same_split and self.tokens_identical

    @property
    def has_same_logits(self) -> bool:
        """Whether resident and warm run can be compared, and have the same logits."""
        return self.same_split and self.logits_identical

    @property
    def may_agree_with_cold(self) -> bool:
        """Whether the warm run does not differ from a cold run."""
        return self.agrees_with_cold is not False


class DemoReport(msgspec.Struct, frozen=True):
    """All results of the demo: times in seconds, sizes of the store's content in bytes.

    ``tokens_identical`` and ``logits_identical`` are True if they are, like ``same_split``, True
    for each of ``requests``; ``agrees_with_cold`` is True if it is False for none of them.
    """

    url: str
    model: str
    codec: str
    prompt_tokens: int
    """Number of tokens of each prompt: the shared tokens and the question."""
    shared_tokens: int
    restored_tokens: int
    """Tokens restored for the new process's first prompt: device and primary tier are empty at that
    time."""
    restored_shared_share: float
    """Share of ``shared_tokens`` that was restored for the first prompt of the new process, 0 to
    1."""
    cold_ttft_s: float
    """Time to first token of the cold runs: median over their prompts."""
    warm_ttft_s: float
    """Time to first token of the first prompt of the new process."""
    speed_up: float
    """``cold_ttft_s`` divided by ``warm_ttft_s``."""
    cold_start_to_first_token_s: float
    """Time from the start of the first process to its first token, including imports and
    warm-up."""
    warm_start_to_first_token_s: float
    tokens_identical: bool
    logits_identical: bool
    agrees_with_cold: bool
    max_logit_difference: float
    pages_identical: bool
    """Whether all restored device pages (KV of one GPU block each) equal those of the first
    process. False if no page was restored."""
    pages_compared: int
    raw_bytes: int
    stored_bytes: int
    codec_ratio: float
    """``raw_bytes`` (KV before the codec) divided by ``stored_bytes`` (encoded); 1 if nothing is
    stored."""
    disk_bytes: int
    requests: list[RequestReport]
    notices: list[str]
    """Messages of the new process's store for the user."""


def _build_report(
    cold: Report,
    warm: Report,
    stats: BackendStats,
    *,
    url: str,
    model: str,
    codec: str,
    shared_tokens: int,
) -> DemoReport:
    """Compare the reports of the first (``cold``) and the new process (``warm``); add the totals of
    the store."""
    computed = {answer.question: answer for answer in cold.answers}
    requests: list[RequestReport] = []
    for resident, answer in zip(cold.resident, warm.answers, strict=True):
        request = _compare(computed.get(answer.question), resident, answer)
        requests.append(request)
    first = requests[0].warm
    cold_ttft = median(answer.stats.ttft_s for answer in cold.answers)
    restored_shared = min(first.restored_tokens, shared_tokens)
    differences = [request.max_logit_difference or 0.0 for request in requests]
    has_same_tokens = all(request.has_same_tokens for request in requests)
    has_same_logits = all(request.has_same_logits for request in requests)
    may_agree_with_cold = all(request.may_agree_with_cold for request in requests)
    has_same_pages = warm.pages.items() <= cold.pages.items()
    codec_ratio = 1.0
    if stats.stored_bytes:
        codec_ratio = stats.raw_bytes / stats.stored_bytes
    return DemoReport(
        url=url,
        model=model,
        codec=codec,
        prompt_tokens=first.prompt_tokens,
        shared_tokens=shared_tokens,
        restored_tokens=first.restored_tokens,
        restored_shared_share=restored_shared / shared_tokens,
        cold_ttft_s=cold_ttft,
        warm_ttft_s=first.ttft_s,
        speed_up=cold_ttft / first.ttft_s,
        cold_start_to_first_token_s=cold.start_to_first_token_s,
        warm_start_to_first_token_s=warm.start_to_first_token_s,
        tokens_identical=has_same_tokens,
        logits_identical=has_same_logits,
        agrees_with_cold=may_agree_with_cold,
        max_logit_difference=max(differences),
        pages_identical=bool(warm.pages) and has_same_pages,
        pages_compared=len(warm.pages),
        raw_bytes=stats.raw_bytes,
        stored_bytes=stats.stored_bytes,
        codec_ratio=codec_ratio,
        disk_bytes=stats.disk_bytes,
        requests=requests,
        notices=warm.notices,
    )


def _compare(cold: Answer | None, resident: Answer, warm: Answer) -> RequestReport:
    """Compare the answers to one prompt; ``cold`` is None if it was not computed in full."""
    cold_stats = None
    agrees_with_cold = None
    max_difference = None
    if cold is not None:
        cold_stats = cold.stats
        agrees_with_cold = cold.tokens == warm.tokens
        pairs = zip(cold.logits, warm.logits, strict=True)
        max_difference = max(abs(ours - theirs) for ours, theirs in pairs)
    return RequestReport(
        question=warm.question,
        cold=cold_stats,
        resident=resident.stats,
        warm=warm.stats,
        same_split=resident.stats.restored_tokens == warm.stats.restored_tokens,
        tokens_identical=resident.tokens == warm.tokens,
        logits_identical=resident.logits_digest == warm.logits_digest,
        agrees_with_cold=agrees_with_cold,
        max_logit_difference=max_difference,
    )


def _print(report: DemoReport) -> None:
    """Print the requests, the totals, the notices, and the output of ``persistkv ls``."""
    console = Console()
    console.print(_requests_table(report))
    console.print(_totals_table(report))
    notices = [printable(notice) for notice in report.notices]
    for line in (*notices, f"$ persistkv ls '{report.url}'"):
        console.print(line, markup=False, highlight=False)
    command = [sys.executable, "-m", "persistkv_tools", "ls", report.url]
    subprocess.run(command, check=False)


def _requests_table(report: DemoReport) -> Table:
    table = Table(
        title="time to the first token of each request, in seconds",
        title_justify="left",
    )
    table.add_column("question")
    for header in ("prompt", "restored", "computed", "cold", "warm", "identical"):
        table.add_column(header, justify="right", no_wrap=True)
    for request in report.requests:
        warm = request.warm
        cold_ttft = "-" if request.cold is None else f"{request.cold.ttft_s:.3f}"
        table.add_row(
            # truncated if the terminal is narrow
            Text(request.question, no_wrap=True, overflow="ellipsis"),
            f"{warm.prompt_tokens:,}",
            f"{warm.restored_tokens:,}",
            f"{warm.computed_tokens:,}",
            cold_ttft,
            f"{warm.ttft_s:.3f}",
            _yes(request.has_same_tokens and request.has_same_logits),
        )
    return table


def _totals_table(report: DemoReport) -> Table:
    cold_ttft = f"{report.cold_ttft_s:.3f} s"
    warm_ttft = f"{report.warm_ttft_s:.3f} s"
    cold_start = f"{report.cold_start_to_first_token_s:.2f} s"
    warm_start = f"{report.warm_start_to_first_token_s:.2f} s"
    shared = f"{report.restored_shared_share:.1%} of {report.shared_tokens:,}"
    is_identical = _yes(report.logits_identical and report.tokens_identical)
    max_difference = f"logits differ by at most {report.max_logit_difference:.1g}"
    agreement = f"{_yes(report.agrees_with_cold)} ({max_difference})"
    pages = f"{_yes(report.pages_identical)} ({report.pages_compared:,} pages)"
    raw = f"{report.raw_bytes / _MIB:.1f} MiB"
    stored = f"{report.stored_bytes / _MIB:.1f} MiB, ratio {report.codec_ratio:.2f}"
    table = Table("", "cold", "warm", title="totals", title_justify="left")
    table.add_row("time to first token", cold_ttft, warm_ttft)
    table.add_row("process start to first token", cold_start, warm_start)
    table.add_row("cold / warm TTFT", "", f"{report.speed_up:.1f}")
    table.add_row("shared tokens restored", "", shared)
    table.add_row("logits and tokens identical to resident KV", "", is_identical)
    table.add_row("tokens equal to the cold run", "", agreement)
    table.add_row("restored pages bit-identical", "", pages)
    table.add_row("KV bytes", "", raw)
    table.add_row(f"stored ({report.codec})", "", stored)
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def main() -> None:
    """Run the demo with the options of the command line."""
    parser = ArgumentParser(prog="demo", description=getdoc(demo), allow_abbrev=False)
    parser.add_argument(
        "--store",
        metavar="URL",
        help="Store for the KV cache; by default a new one under .persistkv-demo.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        default=_DIRECTORY / "model",
        help="Checkpoint with byte-level tokens; created if absent.",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=4000,
        help="Tokens that all prompts share.",
    )
    parser.add_argument(
        "--codec",
        default="raw",
        help="raw, zstd or planes; with a parameter: zstd:LEVEL, planes:WIDTH.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object and nothing else."
    )
    try:
        demo(**vars(parser.parse_args()))
    except PersistKVError as error:
        _log(f"demo: {printable(str(error))}")
        sys.exit(_FAILED)


if __name__ == "__main__":
    main()
