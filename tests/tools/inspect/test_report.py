from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.identity import Identity
from persistkv.storage.store.savings import SavingsRecorder
from persistkv_tools import render
from persistkv_tools.inspect.report import report_data
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
VOID = {"meta", "link", "br"}


@pytest.fixture
def store(url: str) -> str:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, groups=2, codec=ZstdCodec(1), block_bytes=65_536)
        writer.add(
            "first", "s t a b", labels={"user": "<b>anna</b> & co"}, age_s=7200.0
        )
        writer.add("second", "s t a c d e", age_s=3600.0)
        writer.add("third", "s t x", age_s=60.0)
    return url


@pytest.fixture
def page(run: Run, store: str, tmp_path: Path) -> Path:
    done = run("report", store, "-o", "report.html")
    assert done.returncode == 0, done.stderr
    return tmp_path / "report.html"


class Balanced(HTMLParser):
    """Parser that checks that elements are closed in the reverse order of their opening."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def figures(run: Run, store: str) -> list[str]:
    """Return the figures that the page must show."""
    totals = json.loads(run("stat", store, "--json").stdout)
    return [
        f"{totals['blocks']:,}",
        render.format_size(totals["raw_bytes"]),
        render.format_size(totals["stored_bytes"]),
        render.format_size(totals["disk_bytes"]),
        render.format_ratio(totals["raw_bytes"], totals["stored_bytes"]),
        f"{totals['dedup_ratio']:.2f}",
        totals["namespaces"][0]["id"][:8],
        "zstd:1",
        "second",
        # 10 of 26 blocks also belong to earlier requests: 0 of 8, 6 of 12, 4 of 6
        "38.5%",
    ]


class TestReportData:
    def test_periods_match_requests_in_store(self, store: str) -> None:
        with closing(open_backend(store, read_only=True)) as backend:
            data = report_data(store, backend)
        assert sum(period.requests for period in data.periods) == 3
        assert sum(period.blocks for period in data.periods) == 26
        assert sum(period.found_blocks for period in data.periods) == 10
        assert data.periods[-1].held_bytes == 16 * 65_536 == data.totals.raw_bytes
        held = [period.held_bytes for period in data.periods]
        assert held == sorted(held)
        assert [request.id for request in data.largest] == ["second", "first", "third"]
        assert data.tree is not None
        assert data.tree.top.requests == 3

    def test_empty_store_has_no_history(
        self, run: Run, url: str, tmp_path: Path
    ) -> None:
        open_backend(url).close()
        assert run("report", url, "-o", "empty.html").returncode == 0
        assert "over time" not in (tmp_path / "empty.html").read_text()


class TestReportPage:
    def test_page_is_well_formed_without_external_resources(self, page: Path) -> None:
        text = page.read_text()
        parser = Balanced()
        parser.feed(text)
        assert parser.open == []
        assert not [
            tag
            for tag, _ in parser.seen
            if tag in ("script", "img", "iframe", "object")
        ]
        for _, attributes in parser.seen:
            for name in ("src", "href"):
                link = attributes.get(name, "data:")
                assert link is not None
                assert link.startswith("data:")
        assert "url(" not in text
        assert "prefers-color-scheme: dark" in text

    def test_page_contains_figures(self, run: Run, store: str, page: Path) -> None:
        text = html.unescape(page.read_text())
        for figure in figures(run, store):
            assert figure in text

    def test_page_names_models_and_the_time_zone(
        self, run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TZ", "CET-1")
        time.tzset()
        try:
            with closing(open_backend(url)) as backend:
                for name in ("/models/llama", "/models/<gemma>"):
                    identity = Identity.of({"model_name": name, "weights": name})
                    Contexts(backend, identity).add(f"of {name}", "a b")
            assert run("report", url, "-o", "report.html").returncode == 0
            shown = run("show", url, "of /models/llama").stdout
        finally:
            monkeypatch.undo()
            time.tzset()
        page = (tmp_path / "report.html").read_text()
        table = page.partition("<h2>Namespaces</h2>")[2].partition("</table>")[0]
        assert "<td>/models/llama</td>" in table
        assert "<td>/models/&lt;gemma&gt;</td>" in table
        assert re.search(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d CET</p>", page)
        assert re.search(r"created .*:\d\d CET \(", shown)

    def test_label_with_markup_is_escaped(self, page: Path) -> None:
        assert "<b>anna" not in page.read_text()
        assert "&lt;b&gt;anna" in page.read_text()

    def test_unwritable_output_exits_2(self, run: Run, store: str) -> None:
        done = run("report", store, "-o", "absent/report.html")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "cannot write absent/report.html" in done.stderr

    def test_json_has_size_of_page(self, run: Run, store: str, tmp_path: Path) -> None:
        found = json.loads(run("report", store, "-o", "r.html", "--json").stdout)
        assert found["bytes"] == (tmp_path / "r.html").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"
)
class TestInChromium:
    @pytest.fixture
    def chromium(self, tmp_path: Path) -> Run:
        def start(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [
                str(CHROMIUM),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--user-data-dir={tmp_path}/profile",
                "--enable-logging=stderr",
                "--v=0",
                *arguments,
            ]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=150, check=False
            )

        return start

    def test_page_shows_figures_without_console_errors(
        self,
        run: Run,
        store: str,
        page: Path,
        chromium: Run,
    ) -> None:
        done = chromium("--dump-dom", page.as_uri())
        assert done.returncode == 0, done.stderr
        text = html.unescape(
            re.sub(r"<style>.*?</style>|<[^>]+>", " ", done.stdout, flags=re.DOTALL)
        )
        for figure in figures(run, store):
            assert figure in text
        assert not re.findall(r".*CONSOLE.*", done.stderr)

    def test_chromium_console_error_appears_in_stderr(
        self, tmp_path: Path, chromium: Run
    ) -> None:
        """``test_page_shows_figures_without_console_errors`` relies on this behaviour of
        Chromium."""
        (tmp_path / "bad.html").write_text("<script>console.error('seen it')</script>")
        assert (
            "CONSOLE" in chromium("--dump-dom", (tmp_path / "bad.html").as_uri()).stderr
        )

    def test_page_fits_a_window_of_390_pixels(
        self, page: Path, chromium: Run, tmp_path: Path
    ) -> None:
        """Neither the page nor a table with bars is wider; tables of records scroll in their own
        boxes. The window is a frame: Chromium has no windows below 500 pixels."""
        script = """<script>
            const tables = [...document.querySelectorAll(".scroll:has(.track)")];
            const over = [document.documentElement, ...tables].map(
                (box) => box.scrollWidth - box.clientWidth);
            parent.document.body.dataset.over = over.join(" ");
        </script>"""
        framed = html.escape(page.read_text().replace("</body>", f"{script}</body>"))
        probe = tmp_path / "probe.html"
        probe.write_text(
            f'<body><iframe srcdoc="{framed}" width="390"></iframe></body>'
        )
        done = chromium("--dump-dom", probe.as_uri())
        found = re.search(r'data-over="([^"]+)"', done.stdout)
        assert found is not None, done.stderr
        over = list(map(int, found[1].split()))
        assert len(over) == 5  # page, ages, sizes, prefix tree, codecs
        assert over == [0] * 5

    @pytest.mark.parametrize(("dark", "light"), [(False, True), (True, False)])
    def test_page_follows_preferred_colour_scheme(
        self,
        page: Path,
        chromium: Run,
        tmp_path: Path,
        dark: bool,
        light: bool,
    ) -> None:
        image = tmp_path / "page.png"
        how = (
            ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
            if dark
            else []
        )
        done = chromium(
            f"--screenshot={image}", "--window-size=900,1200", *how, page.as_uri()
        )
        assert done.returncode == 0, done.stderr
        pixels = pytest.importorskip("PIL.Image").open(image).convert("L")
        corner = pixels.getpixel((2, 2))
        assert (corner > 200, corner < 60) == (light, dark)


def test_report_shows_savings(run: Run, filled: str, tmp_path: Path) -> None:
    with closing(open_backend(filled)) as backend:
        recorder = SavingsRecorder(backend, Identity.of({"model_name": "m"}))
        recorder.add(4000, {"user": "<anna>"}, 1000, 2.0)
        recorder.write()
    assert run("report", filled, "-o", str(tmp_path / "page.html")).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "4,000 tokens in 1 request, about 8.0 s of prefill" in page
    assert "user=&lt;anna&gt;" in page
