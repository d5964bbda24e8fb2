"""Text from a store or from another process, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with every unprintable character as its Python escape sequence, such as ``\\x1b``.

    Unprintable are control characters (C0, C1, DEL), line ends, and format characters such as bidirectional overrides
    and zero-width spaces. A terminal obeys some of them, and others hide or imitate text.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
