"""How files of the repository become pages of the site: what mkdocs does not do by itself.

1. Pages are not duplicated: the front page is README.md, a driver's page is the README in its
   folder.
2. A link between files, which works where the repository is browsed, becomes one between pages. One
   to a file that is no page becomes its text. One to nothing is a warning, which ``mkdocs build
   --strict`` makes an error.
3. A link to a source file on a line of its own becomes the file's text.
4. A page that would fetch anything over the network causes a warning, too.
5. Blocks with a table, as commands print it, are marked: on small screens they scroll, others wrap.
6. Names in table cells may break after a separator or before a capital letter: narrow columns stay
   readable.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mkdocs.structure.files import File, Files

logger = logging.getLogger("mkdocs.hooks.pages")

ROOT = Path(__file__).parent.parent
PAGES = MappingProxyType(
    {
        "README.md": "index.md",
        "backends/persistkv_dir/README.md": "dir.md",
        "backends/persistkv_lmdb/README.md": "lmdb.md",
        "CHANGELOG.md": "changelog.md",
    }
)
"""Files outside docs/, and the pages that they are."""
STANDS_FOR = MappingProxyType({"backends/persistkv_s3/README.md": "s3.md"})
"""Files that are no page of their own, and where a link to them goes."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_SOURCE = re.compile(r"^\[([\w./-]+\.(py|toml))\]\(([\w./-]+)\)$", re.MULTILINE)
_LANGUAGES = MappingProxyType({"py": "python", "toml": "toml"})
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FETCH = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)",
    re.IGNORECASE,
)
_RULE = "───"
_TABLE = '<pre class="table">'
_BLOCK = re.compile(r"<pre>(?=(.*?)</pre>)", re.DOTALL)
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_NAME = re.compile(r"<code>[^<]*</code>")
_BREAK = re.compile(
    r"(?<=[A-Za-z\]][/_.=])(?=[A-Za-z])(?!py\b)|(?<=[a-z])(?=[A-Z\[])(?<![0-9][KMGT]i)"
)
_OPTION = re.compile(r"<code>(-[^<]{1,30})</code>")
_QUANTITY = re.compile(r"(?<=[0-9]) (?=(?:[KMG]iB|[kMG]B|[µmn]?s|%)(?![A-Za-z]))")
_ELEMENT = re.compile(r"(<(pre|script|style)\b.*?</\2>|<[^>]*>)|[^<]+", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links between files into links between pages, except in code fences."""
    where = page.file.src_uri
    source = next(
        (source for source, name in PAGES.items() if name == where), f"docs/{where}"
    )
    markdown = _SOURCE.sub(_included(source), markdown)
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [
            _LINK.sub(_rewriter(source, where, files), markdown[end : fence.start()]),
            fence[0],
        ]
        end = fence.end()
    return "".join([*parts, _LINK.sub(_rewriter(source, where, files), markdown[end:])])


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn about content that a browser would fetch over the network; mark blocks with tables,
    where names in tables may break, and where options, and numbers with their units, must not.
    """
    for url in _FETCH.findall(output):
        logger.warning(
            "%s fetches %s: the site is to be read without a network",
            page.file.src_uri,
            url,
        )
    output = _BLOCK.sub(lambda block: _TABLE if _RULE in block[1] else block[0], output)
    output = _CELL.sub(
        lambda cell: _NAME.sub(lambda name: _BREAK.sub("<wbr>", name[0]), cell[0]),
        output,
    )
    output = _OPTION.sub(r'<code class="whole">\1</code>', output)
    return _ELEMENT.sub(
        lambda part: part[0] if part[1] else _QUANTITY.sub("\u00a0", part[0]), output
    )


def _included(source: str) -> Callable[[re.Match[str]], str]:
    def include(link: re.Match[str]) -> str:
        title, suffix, target = link.groups()
        text = (ROOT / posixpath.dirname(source) / target).read_text()
        return f'```{_LANGUAGES[suffix]} title="{title}"\n{text}```'

    return include


def _rewriter(source: str, where: str, files: Files) -> Callable[[re.Match[str]], str]:
    def rewrite(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        name = PAGES.get(found) or STANDS_FOR.get(found) or found.removeprefix("docs/")
        if files.get_file_from_path(name) is not None and (
            found.startswith("docs/") or name != found
        ):
            relative = posixpath.relpath(name, posixpath.dirname(where) or ".")
            return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"
        if not (ROOT / found).exists():
            logger.warning("%s links to %s, which is not there", source, target)
        return text

    return rewrite
