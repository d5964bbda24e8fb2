"""The pictures in docs/screens.md: commands on terminals, and the page of ``persistkv report`` in a
browser.

``make screenshots`` draws them. The store holds synthetic blocks: conversations with an assistant
that share a system prompt. The pictures show the real output of the commands, except that the
directory is replaced by /var/cache/kv.
"""

from __future__ import annotations

import io
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from benchmarks.tools_beside import Engine
from persistkv.storage import open_backend
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.identity import Identity
from tests.tools.contexts import LLAMA, Contexts
from tests.tools.terminals import on_terminal

PICTURES = Path(__file__).parents[2] / "docs" / "screens"
SHOWN_AS = "/var/cache/kv"
REQUEST = "0c4de6a0-000007"
COMMANDS = {
    "ls": ("ls", "{url}", "--limit", "8"),
    "stat": ("stat", "{url}"),
    "show": ("show", "{url}", REQUEST, "--tree", "--nodes", "12"),
    "verify": ("verify", "{url}"),
    "prune": ("prune", "{url}", "--label", "user=anna", "--dry-run"),
    "top": ("top", "{engine}", "--count", "1", "--interval", "4s"),
}
WIDTHS = {
    "ls": (80, 160),
    "stat": (80,),
    "show": (80, 160),
    "verify": (80,),
    "prune": (80,),
    "top": (80, 160),
}
MODEL = Identity.of({**LLAMA.fields, "model_name": "/models/llama-3.2-1b"})
USERS = ("anna", "bert", "carl")
HOUR_S = 3600.0


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        place = Path(directory)
        url, busy = (
            f"lmdb://{place}/store?capacity=1GiB",
            f"lmdb://{place}/busy?capacity=1GiB",
        )
        fill(url)
        engine = Engine(busy)
        storing = threading.Thread(target=engine.rate, args=(30.0,))
        storing.start()
        for name, command in COMMANDS.items():
            arguments = [
                part.format(url=url.partition("?")[0], engine=busy.partition("?")[0])
                for part in command
            ]
            for width in WIDTHS[name]:
                shown, _ = on_terminal(
                    width, *arguments, cwd=place, environment={"COLORTERM": "truecolor"}
                )
                title = " ".join(["persistkv", *arguments])
                draw(
                    f"{name}-{width}.svg",
                    plain(shown, place),
                    plain(title, place),
                    width,
                )
        storing.join()
        engine.close()
        page = place / "report.html"
        on_terminal(80, "report", url, "-o", str(page), cwd=place)
        page.write_text(plain(page.read_text(), place))
        photograph(page, PICTURES / "report.png")
    total = sum(path.stat().st_size for path in PICTURES.iterdir())
    sys.stdout.write(
        f"{len(list(PICTURES.iterdir()))} pictures, {total >> 10} KiB, in {PICTURES}\n"
    )


def fill(url: str) -> None:
    """Store the conversations of some users, turn by turn."""
    draw_ = random.Random(1)
    prompt = " ".join(f"s{word}" for word in range(12))
    talks: dict[int, str] = {}
    with closing(open_backend(url)) as backend:
        writer = Contexts(
            backend, MODEL, groups=2, codec=ZstdCodec(1), block_bytes=65_536
        )
        for number in range(40):
            talk = draw_.randrange(12)
            words = " ".join(
                f"t{talk}-{number}-{word}" for word in range(draw_.randint(4, 16))
            )
            talks[talk] = f"{talks.get(talk, prompt)} {words}"
            labels = {"app": "assistant", "user": USERS[talk % len(USERS)]}
            writer.add(
                f"0c4de6a0-{number:06d}",
                talks[talk],
                labels=labels,
                age_s=(40 - number) * 1.7 * HOUR_S,
            )


def plain(text: str, place: Path) -> str:
    """Replace the directory of the store by a fixed one."""
    return re.sub(rf"{re.escape(str(place))}/(store|busy)", SHOWN_AS, text)


def draw(name: str, shown: str, title: str, width: int) -> None:
    """Draw the output of a terminal as a picture that refers to no remote fonts."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text.from_ansi(last_frame(shown)))
    svg = console.export_svg(title=title, theme=SVG_EXPORT_THEME)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (PICTURES / name).write_text(re.sub(r"[ \t]*\n[ \t]*", "\n", svg))


def last_frame(shown: str) -> str:
    """Remove progress bars that the command erased."""
    # at the end of a bar: one line up, and erase it
    shown = re.sub(r"[^\n]*\n[^\n]*\x1b\[1A\x1b\[2K", "", shown)
    return "\n".join(
        re.split(r"\r(?:\x1b\[2K)?", line)[-1].rstrip() for line in shown.split("\n")
    ).strip("\n")


def photograph(page: Path, target: Path) -> None:
    """Take a screenshot of the page in Chromium.

    :raises FileNotFoundError: Chromium is not installed.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("chromium, to draw the page of `persistkv report` with")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1120,1486",
    ]
    command = [browser, *options, f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
