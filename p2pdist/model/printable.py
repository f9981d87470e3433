"""Names that somebody else chose, fit for a terminal or a message."""

from __future__ import annotations


def printable(text: str) -> str:
    """Bytes that are not UTF-8 (surrogates, as in os.fsdecode), control characters and others that
    show nothing as escapes."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
