"""Callbacks of preseeds: tells the URL in an order, once, that the preseed is done, and once that
it has failed, was cancelled or has expired (p2pdist/model/callback.py).

A tracker sends requests for whoever may order preseeds, so it sends them only to hosts that its
operator names in the file of --callbacks (TOML); without that file orders with callbacks are
refused. Redirects are not followed, proxies of the environment not used, and answers not read.

hosts = ["scheduler.example.org", "*.jobs.example.org:8443"]
key = "at least 32 characters"

What was told is in the preseed's record. Before an attempt a tracker writes it there, and makes it
only if the record was still as it knew it: of several trackers on one database one tells, and
attempts and pauses outlive restarts. Where a tracker dies during an attempt another makes the
next one, so a program may hear of an end twice, under one id.
"""

from __future__ import annotations

import asyncio
import logging
import time
import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from p2pdist.files import decoded, read_content
from p2pdist.model.callback import ID_HEADER, KEY_CHARACTERS_MIN, SIGNATURE_HEADER, TIME_HEADER, signature
from p2pdist.model.errors import P2PDistError, Refused, UsageError, unreached
from p2pdist.model.preseed import Call, CallState, PreseedRecord, given_id
from p2pdist.model.url import redacted
from tracker.core.preseeds.preseed import Loaded
from tracker.preseed_service import PreseedService
from tracker.state.preseeds import PreseedDatabase

LOOK_S = 0.5
PAUSE_S = 5.0
PAUSE_FACTOR = 3.0
PAUSE_S_MAX = 3600.0
TRIES_MAX = 10
"""The first attempt, and nine after 5 s, 15 s, 45 s ... an hour: in all three and a half hours."""

AT_ONCE_MAX = 16
REQUEST_S_MAX = 10.0
FILE_BYTES_MAX = 1 << 16
PATTERNS_MAX = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallbackSettings:
    """Where callbacks may lead, as patterns of `host` or `host:port`, and the key that signs
    them."""

    hosts: tuple[str, ...]
    key: str

    def __repr__(self) -> str:
        return f"CallbackSettings(hosts={self.hosts!r})"

    def check(self, url: str) -> None:
        """Raises UsageError for a URL that is none, Refused for a host that no pattern names."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or not url.isprintable():
            raise UsageError(
                "the callback is no URL", remedy="Write https://host:port/path, without a user or password"
            )
        whole = f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"
        if not any(fnmatchcase(whole if ":" in each else host, each) for each in self.hosts):
            raise Refused(f"callbacks may not lead to {whole}", remedy="Have its host added to the file of --callbacks")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    hosts: list[str]
    key: str


def read_callbacks(path: Path) -> CallbackSettings:
    """The settings in a file that only its owner reads. Raises UsageError."""
    try:
        data, mode = read_content(path, FILE_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            f"the file of callbacks {path} cannot be read: {error.strerror}", remedy="Check --callbacks"
        ) from error
    if mode & 0o077:
        raise UsageError(f"others may read the key in {path}", remedy=f"chmod 600 {path}")
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX} bytes, and is no file of callbacks")
    try:
        found = msgspec.convert(tomllib.loads(decoded(data)), _File)
    except (ValueError, RecursionError) as error:  # its text may hold the key
        raise UsageError(f"{path} is no file of callbacks", remedy='Write hosts = ["..."] and key = "..."') from error
    if len(found.key) < KEY_CHARACTERS_MIN:
        raise UsageError(f"the key in {path} is short", remedy=f"Give {KEY_CHARACTERS_MIN} characters or more")
    if not 0 < len(found.hosts) <= PATTERNS_MAX:
        raise UsageError(f"{path} names {len(found.hosts)} hosts", remedy=f"Name 1 to {PATTERNS_MAX}")
    return CallbackSettings(tuple(host.lower() for host in found.hosts), found.key)


class Callbacks:
    """Tells of the preseeds of a service."""

    def __init__(self, preseeds: PreseedService, database: PreseedDatabase, settings: CallbackSettings) -> None:
        self._preseeds, self._database, self._settings = preseeds, database, settings
        self._calling: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look for ends to tell of every LOOK_S, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
            try:
                while True:
                    self._look(http)
                    await asyncio.sleep(LOOK_S)
            finally:
                for task in self._calling.values():
                    task.cancel()
                await asyncio.gather(*self._calling.values(), return_exceptions=True)

    def _look(self, http: aiohttp.ClientSession) -> None:
        now = self._preseeds.now()
        for identifier, preseed in self._preseeds.core.by_id.items():
            if len(self._calling) >= AT_ONCE_MAX:
                return
            if identifier in self._calling or not preseed.request.callback:
                continue
            state = _end(preseed.record, preseed.tally.state)
            if state is None or not _is_due(preseed.record.call, state, now=now):
                continue
            task = asyncio.create_task(self._call(http, preseed.record, preseed.request.callback, state))
            self._calling[identifier] = task
            task.add_done_callback(partial(self._called, identifier))

    def _called(self, identifier: str, task: asyncio.Task[None]) -> None:
        del self._calling[identifier]

    async def _call(self, http: aiohttp.ClientSession, record: PreseedRecord, url: str, state: CallState) -> None:
        """Make an attempt, if no other tracker makes it."""
        try:
            before = record.call
            tries = before.tries + 1 if before is not None and before.state == state else 1
            pause_s = min(PAUSE_S_MAX, PAUSE_S * PAUSE_FACTOR ** (tries - 1))
            # Others make no attempt while this one lasts; a tracker that dies leaves it to them.
            call = Call(state, tries, self._preseeds.now() + REQUEST_S_MAX + pause_s)
            claimed = replace(record, call=call)
            found = await self._database.call(self._database.replace, claimed)
            if found is not None:
                self._took(found)
            if found != replace(claimed, version=record.version + 1):
                return
            problem = await self._tell(http, record, url, state)
            if problem:
                given_up = "; it is given up" if tries >= TRIES_MAX else f"; again in {pause_s:g} s"
                logger.warning(
                    "preseed %s: its callback failed (attempt %d): %s%s", record.id, tries, problem, given_up
                )
            ended = replace(call, told=not problem, at=self._preseeds.now() + pause_s)
            changed = await self._database.call(
                self._database.change, record.id, lambda now: replace(now, call=ended) if now.call == call else now
            )
            if changed is not None:
                self._took(changed)
        except P2PDistError as error:
            logger.warning("preseed %s: its callback is put off: %s", record.id, error)
        except Exception:
            logger.exception("preseed %s: its callback failed", record.id)

    def _took(self, record: PreseedRecord) -> None:
        self._preseeds.submit(Loaded((record,)))

    async def _tell(self, http: aiohttp.ClientSession, record: PreseedRecord, url: str, state: CallState) -> str:
        """Send the progress; returns what went wrong, empty where nothing did."""
        try:
            self._settings.check(url)  # the file may have changed since the order
        except P2PDistError as error:
            return str(error)
        progress = self._preseeds.progress(record.id)
        body = msgspec.json.encode(replace(progress, id=given_id(record.id, record.owner), state=state))
        sent_at = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            ID_HEADER: f"{record.id}.{int(record.created_at)}.{state}",
            TIME_HEADER: sent_at,
            SIGNATURE_HEADER: signature(self._settings.key, sent_at, body),
        }
        try:
            async with http.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                return "" if 200 <= answer.status < 300 else f"{redacted(url)} answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{redacted(url)} does not answer: {unreached(error).replace(url, redacted(url))}"


def _end(record: PreseedRecord, shown: str) -> CallState | None:
    """The end of a preseed that is to be told; failed is also one whose hosts are all given up or
    done."""
    if record.state != "running":
        return record.state
    return "failed" if shown == "failed" else None


def _is_due(call: Call | None, state: CallState, *, now: float) -> bool:
    if call is None or call.state != state:
        return True
    return not call.told and call.tries < TRIES_MAX and now >= call.at
