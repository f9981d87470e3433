"""One table of a policy file while it is read: typed values, and every mistake by table, key and
remedy.

Reading never stops at a mistake: the author of the file sees all of them at once. What a
mistaken value would have been does not matter then, since a file with a mistake is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from p2pdist.model.errors import P2PDistError

SHOWN_MAX = 80
MISTAKES_MAX = 100

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Mistake:
    """`table` and `key` say where; either may be empty."""

    table: str
    key: str
    what: str
    remedy: str

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.table, self.key) if part)
        return f"{where}: {self.what}. {self.remedy}" if where else f"{self.what}. {self.remedy}"


class Section:
    """A table of the file. `mistakes` is shared with the tables around it; at most MISTAKES_MAX
    are noted."""

    def __init__(self, name: str, values: Mapping[str, Any], mistakes: list[Mistake]) -> None:
        self.name, self._values, self._mistakes = name, values, mistakes
        self._asked: dict[str, None] = {}

    def wrong(self, key: str, what: str, remedy: str) -> None:
        """Note a mistake."""
        if len(self._mistakes) < MISTAKES_MAX:
            self._mistakes.append(Mistake(self.name, key, what, remedy))

    def has(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> Any:
        """A value that another rule reads and checks."""
        return self._values.get(key)

    def text(self, key: str, remedy: str) -> str | None:
        """A string, None where there is none."""
        value = self._take(key)
        if value is None or isinstance(value, str):
            return value
        self.wrong(key, f"{quoted(value)} is not a text", remedy)
        return None

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """One of some words."""
        remedy = f"Write one of {', '.join(choices)}"
        value = self.text(key, remedy)
        if value is None or value in choices:
            return value
        self.wrong(key, f"{quoted(value)} is none of them", remedy)
        return None

    def parsed(self, key: str, parse: Callable[[str], Value], example: str) -> Value | None:
        """A string that `parse`, which raises P2PDistError, understands."""
        value = self.text(key, f'Write it in quotation marks, such as "{example}"')
        if value is None:
            return None
        try:
            return parse(value[:1000])
        except P2PDistError as error:
            self.wrong(key, error.what, error.remedy or f'Write it like "{example}"')
            return None

    def number(self, key: str, low: int, high: int) -> int | None:
        """A whole number within limits."""
        value = self._take(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        self.wrong(key, f"{quoted(value)} is not a whole number from {low} to {high}", "Write such a number")
        return None

    def truth(self, key: str) -> bool | None:
        """True or false, None where there is neither."""
        value = self._take(key)
        if value is None or isinstance(value, bool):
            return value
        self.wrong(key, f"{quoted(value)} is neither true nor false", "Write one of them, without quotation marks")
        return None

    def texts(self, key: str, most: int, example: str) -> tuple[str, ...] | None:
        """From 1 to `most` strings, each once."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, list) and 0 < len(value) <= most and all(isinstance(each, str) and each for each in value):
            if len(set(value)) == len(value):
                return tuple(value)
            self.wrong(key, f"{quoted(value)} names something twice", "Name each once")
        else:
            self.wrong(key, f"{quoted(value)} is not a list of 1 to {most} texts", f"Write a list, such as {example}")
        return None

    def table(self, key: str, example: str) -> Section | None:
        """A table within this one."""
        value = self._take(key)
        if isinstance(value, dict):
            return Section(f"{self.name}.{key}", value, self._mistakes)
        if value is not None:
            self.wrong(key, f"{quoted(value)} is not a table", f"Write {example}")
        return None

    def tables(self, key: str) -> list[dict[str, Any]]:
        """A list of tables, `[[key]]`."""
        value = self._take(key)
        if isinstance(value, list) and all(isinstance(each, dict) for each in value):
            return value
        if value is not None:
            self.wrong(key, f"{quoted(value)} is not a list of tables", f"Head each with [[{key}]]")
        return []

    def end(self) -> None:
        """All keys that there are have been asked for: the others are mistakes."""
        for key in self._values:
            if key not in self._asked:
                near = get_close_matches(key, self._asked, n=1)
                known = f"Write {near[0]}" if near else f"Remove it; keys are {', '.join(self._asked)}"
                self.wrong(key[:SHOWN_MAX], "there is no such key", known)

    def _take(self, key: str) -> Any:
        self._asked[key] = None
        return self._values.get(key)


def quoted(value: Any) -> str:
    """A value as it is named in a mistake."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes; TOML may give it in base 16
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."
