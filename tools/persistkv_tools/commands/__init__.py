"""The commands, one family a module. A new one is a module, or a function in one, and its line here."""

from __future__ import annotations

from collections.abc import Callable

from persistkv_tools.commands.bench import bench_
from persistkv_tools.commands.carry import export, import_, pull, push_
from persistkv_tools.commands.doctor import doctor
from persistkv_tools.commands.label import label
from persistkv_tools.commands.ls import ls
from persistkv_tools.commands.move import move
from persistkv_tools.commands.pin import pin, unpin
from persistkv_tools.commands.prune import prune
from persistkv_tools.commands.replay import replay_
from persistkv_tools.commands.report import report
from persistkv_tools.commands.serve import serve_metrics
from persistkv_tools.commands.show import show
from persistkv_tools.commands.stat import stat
from persistkv_tools.commands.top import top
from persistkv_tools.commands.verify import verify
from persistkv_tools.commands.why import why

COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "stat": stat,
    "show": show,
    "top": top,
    "report": report,
    "verify": verify,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "label": label,
    "why": why,
    "doctor": doctor,
    "export": export,
    "import": import_,
    "push": push_,
    "pull": pull,
    "move": move,
    "bench": bench_,
    "replay": replay_,
    "serve-metrics": serve_metrics,
}
"""In the order of the help."""
