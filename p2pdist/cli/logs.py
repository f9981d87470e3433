"""What daemons log: one line an event on standard error, as text, logfmt or JSON.

Each line has the time (UTC, ISO 8601), level, logger and message, and the request that it was
written for if there is one (p2pdist/model/request_id.py). What strangers send cannot make lines of
its own: control characters are escaped. Credentials do not get into a line, whoever logs it: user
information in URLs, and what follows the usual names of secrets, is left out.

The standard library does this with one formatter. A library would format JSON but not logfmt, or
bring a logger of its own to which the libraries that log here do not write.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

import click

from p2pdist.model.request_id import REQUEST_ID

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "logfmt", "json")
Format = Literal["text", "logfmt", "json"]
HIDDEN = "***"

_SECRETS = re.compile(
    r"(?P<scheme>://)[^\s/?#'\"<>]*@"
    r"|(?P<scheme_of>\bauthorization['\"]?\s*+[:=]\s*+['\"]?(?:(?:bearer|basic|digest|negotiate|token)\s+)?)[^\s'\",;]+"
    r"|(?P<bearer>\b(?:bearer|basic)\s++)[A-Za-z0-9+/=._~-]{8,}"
    r"|(?P<name>(?:password|passwd|passphrase|secret|token|signature|credential|api[_-]?key|access[_-]?key)[\w-]{0,64}+"
    r"['\"]?\s*+[:=]\s*+['\"]?)[^\s&'\",;]+"
    r"|(?P<sig>[?&]sig=)[^\s&'\"]+",
    re.IGNORECASE,
)
"""Takes time in proportion to the text, whatever stands in it: strangers choose some of what is
logged, and events wait meanwhile."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {
    10: "\\n",
    13: "\\r",
    9: "\\t",
}
_PLAIN = re.compile(r"[^\s\"=\\]+")

EARLY: list[str] = []
"""Warnings of a daemon from before it was known how it logs."""

Function = TypeVar("Function", bound=Callable[..., Any])


def log_options(function: Function) -> Function:
    """--log-level and --log-format, for a daemon's verb: logging is set up before it begins."""

    @functools.wraps(function)
    def logged(*args: Any, log_level: str, log_format: Format, **more: Any) -> Any:
        set_up_logging(log_level, log_format)
        return function(*args, **more)

    found: Any = logged
    for option in (
        click.option(
            "--log-format",
            default="text",
            show_default=True,
            type=click.Choice(FORMATS),
            help="How a line of the log is written.",
        ),
        click.option(
            "--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="How much to log."
        ),
    ):
        found = option(found)
    return cast(Function, found)


def set_up_logging(level: str, form: Format = "text") -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(form))
    handler.addFilter(_note_request)
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler])
    logging.getLogger("aiohttp.server").addFilter(_malformed_in_one_line)
    while EARLY:
        logging.getLogger("p2pdist.cli").warning("%s", EARLY.pop(0))


def set_level(level: str) -> None:
    """Log from this level on."""
    logging.getLogger().setLevel(getattr(logging, level.upper()))


def without_secrets(text: str) -> str:
    """The text with credentials left out."""
    return _SECRETS.sub(
        lambda found: next(filter(None, found.groups()), "") + HIDDEN + ("@" if found["scheme"] else ""), text
    )


class _Lines(logging.Formatter):
    """See the module's text."""

    def __init__(self, form: Format) -> None:
        super().__init__()
        self._write = {"text": _text, "logfmt": _logfmt, "json": _json}[form]

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        if name := getattr(record, "request_id", ""):
            fields["request_id"] = name
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = without_secrets(self.formatException(record.exc_info))
        return self._write(fields)


def _json(fields: dict[str, str]) -> str:
    return json.dumps(fields)


def _logfmt(fields: dict[str, str]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: str) -> str:
    """As it is where it is plain, else quoted as in JSON."""
    return value if _PLAIN.fullmatch(value) and value.isprintable() else json.dumps(value)


def _text(fields: dict[str, str]) -> str:
    """For people: tracebacks keep their lines, which are indented, so that none passes for another
    event."""
    request = f" request={fields['request_id']}" if "request_id" in fields else ""
    line = f"{fields['time']} level={fields['level'].upper()} logger={fields['logger']}{request} "
    trace = fields["exception"].split("\n") if "exception" in fields else []
    return "\n  ".join((line + fields["message"].translate(_CONTROL), *(each.translate(_CONTROL) for each in trace)))


def _note_request(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True


def _malformed_in_one_line(record: logging.LogRecord) -> bool:
    """What strangers send to an open port is no failure of ours: no traceback, and nothing of it in
    the log."""
    from aiohttp.http import HttpProcessingError  # not for those who only print their help

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", ()
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
