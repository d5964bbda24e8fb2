"""The commands, one family a module. A new one is a module, or a function in one, and its line here."""

from __future__ import annotations

from collections.abc import Callable

from persistkv_tools.commands.carry import export, import_, push_
from persistkv_tools.commands.ls import ls
from persistkv_tools.commands.move import move
from persistkv_tools.commands.pin import pin, unpin
from persistkv_tools.commands.prune import prune
from persistkv_tools.commands.show import show
from persistkv_tools.commands.stat import stat
from persistkv_tools.commands.verify import verify
from persistkv_tools.commands.why import why

COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "move": move,
    "show": show,
    "stat": stat,
    "verify": verify,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "why": why,
    "export": export,
    "import": import_,
    "push": push_,
}
