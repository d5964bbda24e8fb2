"""The demo's results: as one JSON object, a table, and a chart."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persistkv.errors import printable
from persistkv.integrations.transformers.demo.messages import Answer, ColdReport, WarmReport
from persistkv.storage.extensions import BackendStats


class RequestReport(msgspec.Struct, frozen=True):
    """One prompt, answered cold (first prompts only), on the resident cache, and warm."""

    question: str
    prompt_tokens: int
    cold_ttft_s: float | None
    resident_ttft_s: float
    warm_ttft_s: float
    restored_tokens: int
    device_tokens: int
    cpu_tokens: int
    persistent_tokens: int
    computed_tokens: int
    bytes_loaded: int
    lookup_s: float
    load_s: float
    same_split: bool
    """The resident run restored as many tokens as the warm one: only then can they be compared bit by bit."""
    tokens_identical: bool
    """Whether the warm run's tokens equal those of the resident run."""
    logits_identical: bool
    agrees_with_cold: bool | None
    """Whether the tokens equal those of the cold run, which computed the prompt at once and so rounded differently."""
    max_logit_difference: float | None
    """Largest difference from the cold run's logits."""


class DemoReport(msgspec.Struct, frozen=True):
    """All results; times in seconds, sizes in bytes."""

    url: str
    model: str
    codec: str
    prompt_tokens: int
    """Of the first prompt."""
    shared_tokens: int
    restored_tokens: int
    """Of the first prompt, for which the device and the primary tier are empty."""
    restored_shared_share: float
    """Share of the shared tokens that was restored for the first prompt."""
    cold_ttft_s: float
    """Median over the prompts."""
    warm_ttft_s: float
    """Of the first prompt of the new process."""
    speed_up: float
    cold_start_to_first_token_s: float
    """From the start of the process, including imports and warm-up."""
    warm_start_to_first_token_s: float
    tokens_identical: bool
    logits_identical: bool
    agrees_with_cold: bool
    max_logit_difference: float
    pages_identical: bool
    pages_compared: int
    raw_bytes: int
    stored_bytes: int
    codec_ratio: float
    disk_bytes: int
    requests: list[RequestReport]
    notices: list[str]

    @property
    def good(self) -> bool:
        """Whether all results that must be identical are."""
        return self.tokens_identical and self.logits_identical and self.pages_identical


def build_report(
    cold: ColdReport, warm: WarmReport, stats: BackendStats, *, url: str, model: str, codec: str, shared_tokens: int
) -> DemoReport:
    """Compare the reports of the two processes."""
    computed = {answer.question: answer for answer in cold.cold}
    requests = [
        _compare(computed.get(answer.question), resident, answer)
        for resident, answer in zip(cold.resident, warm.answers, strict=True)
    ]
    first = requests[0]
    cold_ttft = median(answer.ttft_s for answer in cold.cold)
    return DemoReport(
        url=url,
        model=model,
        codec=codec,
        prompt_tokens=first.prompt_tokens,
        shared_tokens=shared_tokens,
        restored_tokens=first.restored_tokens,
        restored_shared_share=min(first.restored_tokens, shared_tokens) / shared_tokens,
        cold_ttft_s=cold_ttft,
        warm_ttft_s=first.warm_ttft_s,
        speed_up=cold_ttft / first.warm_ttft_s,
        cold_start_to_first_token_s=cold.start_to_first_token_s,
        warm_start_to_first_token_s=warm.start_to_first_token_s,
        tokens_identical=all(request.same_split and request.tokens_identical for request in requests),
        logits_identical=all(request.same_split and request.logits_identical for request in requests),
        agrees_with_cold=all(request.agrees_with_cold is not False for request in requests),
        max_logit_difference=max(request.max_logit_difference or 0.0 for request in requests),
        pages_identical=bool(warm.pages) and all(cold.pages.get(key) == page for key, page in warm.pages.items()),
        pages_compared=len(warm.pages),
        raw_bytes=stats.raw_bytes,
        stored_bytes=stats.stored_bytes,
        codec_ratio=stats.raw_bytes / stats.stored_bytes if stats.stored_bytes else 1.0,
        disk_bytes=stats.disk_bytes,
        requests=requests,
        notices=warm.notices,
    )


def _compare(cold: Answer | None, resident: Answer, warm: Answer) -> RequestReport:
    return RequestReport(
        question=warm.question,
        prompt_tokens=warm.prompt_tokens,
        cold_ttft_s=None if cold is None else cold.ttft_s,
        resident_ttft_s=resident.ttft_s,
        warm_ttft_s=warm.ttft_s,
        restored_tokens=warm.restored_tokens,
        device_tokens=warm.device_tokens,
        cpu_tokens=warm.cpu_tokens,
        persistent_tokens=warm.persistent_tokens,
        computed_tokens=warm.computed_tokens,
        bytes_loaded=warm.bytes_loaded,
        lookup_s=warm.lookup_s,
        load_s=warm.load_s,
        same_split=resident.restored_tokens == warm.restored_tokens,
        tokens_identical=resident.tokens == warm.tokens,
        logits_identical=resident.logits_digest == warm.logits_digest,
        agrees_with_cold=None if cold is None else cold.tokens == warm.tokens,
        max_logit_difference=None if cold is None else _distance(cold.logits, warm.logits),
    )


def _distance(ours: list[float], theirs: list[float]) -> float:
    return max(abs(our - their) for our, their in zip(ours, theirs, strict=True))


def print_report(report: DemoReport, console: Console) -> None:
    """Print the requests, then the totals, then the notices."""
    console.print(_requests_table(report))
    console.print(_totals_table(report))
    for notice in report.notices:
        console.print(printable(notice), markup=False)


def _requests_table(report: DemoReport) -> Table:
    table = Table(title="first token of each request, in seconds", title_justify="left")
    table.add_column("question")
    for header in ("prompt", "restored", "computed", "cold", "warm", "as resident"):
        table.add_column(header, justify="right", no_wrap=True)
    for request in report.requests:
        same = request.same_split and request.tokens_identical and request.logits_identical
        table.add_row(
            Text(request.question, no_wrap=True, overflow="ellipsis"),  # truncated if the terminal is narrow
            f"{request.prompt_tokens:,}",
            f"{request.restored_tokens:,}",
            f"{request.computed_tokens:,}",
            "-" if request.cold_ttft_s is None else f"{request.cold_ttft_s:.3f}",
            f"{request.warm_ttft_s:.3f}",
            _yes(same),
        )
    return table


def _totals_table(report: DemoReport) -> Table:
    table = Table("", "cold", "warm", title="the whole", title_justify="left")
    table.add_row("time to first token", f"{report.cold_ttft_s:.3f} s", f"{report.warm_ttft_s:.3f} s")
    table.add_row(
        "process start to first token",
        f"{report.cold_start_to_first_token_s:.2f} s",
        f"{report.warm_start_to_first_token_s:.2f} s",
    )
    table.add_row("cold / warm TTFT", "", f"{report.speed_up:.1f}")
    table.add_row("shared tokens restored", "", f"{report.restored_shared_share:.1%} of {report.shared_tokens:,}")
    table.add_row(
        "logits and tokens as on a resident cache", "", _yes(report.logits_identical and report.tokens_identical)
    )
    table.add_row(
        "tokens as in the cold run",
        "",
        f"{_yes(report.agrees_with_cold)} (logits differ by at most {report.max_logit_difference:.1g})",
    )
    table.add_row(
        "restored pages bit-identical", "", f"{_yes(report.pages_identical)} ({report.pages_compared:,} pages)"
    )
    mebibytes = 1 << 20
    table.add_row("KV bytes kept", "", f"{report.raw_bytes / mebibytes:.1f} MiB")
    table.add_row(
        f"stored ({report.codec})", "", f"{report.stored_bytes / mebibytes:.1f} MiB, ratio {report.codec_ratio:.2f}"
    )
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def write_chart(report: DemoReport, path: Path) -> bool:
    """Write a bar chart of the times to first token; return False, without a chart, if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.barh(
        ["warm, new process", "cold"], [report.warm_ttft_s, report.cold_ttft_s], color=["#2a9d8f", "#8d99ae"]
    )
    axes.bar_label(bars, fmt="%.3f s", padding=4)
    axes.set_xlabel("seconds to the first token")
    axes.set_title(
        f"{report.restored_tokens:,} of {report.prompt_tokens:,} tokens restored: {report.speed_up:.0f} times sooner"
    )
    axes.margins(x=0.15)
    figure.savefig(path, dpi=150)
    return True
