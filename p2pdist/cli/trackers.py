"""What the verbs that talk to a tracker share: how it is found, and asking it."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from p2pdist.model.errors import UNDECODABLE, P2PDistError, Unavailable, UsageError, from_problem
from p2pdist.model.request_id import HEADER

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES_MAX = 256 << 20
REQUEST_S_MAX = 60.0
CONNECT_S_MAX = 5.0

Function = TypeVar("Function", bound=Callable[..., Any])


def tracker_option(function: Function) -> Function:
    return click.option(
        "--tracker",
        default="http://127.0.0.1:7070",
        show_default=True,
        metavar="URL[,URL]",
        help="Trackers, tried in turn. Also from P2PDIST_TRACKER.",
    )(function)


def hosts_options(function: Function) -> Function:
    """Which hosts: by name or by where they stand."""
    function = click.option(
        "--selector", metavar="KEY=VALUE,...", help="Hosts by zone and rack, such as zone=a,rack=r1."
    )(function)
    return click.option("--host", "hosts", multiple=True, metavar="HOST", help="A host by name; may be repeated.")(
        function
    )


class TrackerClient:
    """Asks the first of the trackers that answers; an asynchronous context manager. Every call
    raises the failure that the tracker reports, or Unavailable when none answers."""

    def __init__(self, urls: str) -> None:
        self._urls = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]
        if not self._urls or not all(url.startswith(("http://", "https://")) for url in self._urls):
            raise UsageError("--tracker names no tracker", remedy="Write http://host:7070")
        self._session: aiohttp.ClientSession | None = None
        self.answered = ""  # the tracker that answered last, for people

    async def __aenter__(self) -> TrackerClient:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX, sock_connect=CONNECT_S_MAX)
        self._session = aiohttp.ClientSession(timeout=timeout, headers={HEADER: os.urandom(8).hex()})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON."""
        failure: Unavailable | None = None
        for url in self._urls:
            try:
                return await self._ask(method, url, path, body)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    async def _ask(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> Any:
        import aiohttp

        from p2pdist.model.url import redacted

        assert self._session is not None, "a TrackerClient is used inside `async with`"
        self.answered = redacted(url)
        try:
            async with self._session.request(method, url + path, json=body) as answer:
                data = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 18):
                    data += chunk
                    if len(data) > ANSWER_BYTES_MAX:
                        raise P2PDistError(f"the tracker {redacted(url)} answered more than {ANSWER_BYTES_MAX} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error).replace(url, redacted(url)) or type(error).__name__
            raise Unavailable(
                f"the tracker {redacted(url)} does not answer: {said}", remedy="Start it, or name it with --tracker"
            ) from error
        try:
            if answer.status >= 400:
                raise from_problem(msgspec.json.decode(data, type=dict[str, Any]))
            return msgspec.json.decode(data)
        except UNDECODABLE as error:
            raise Unavailable(
                f"what answers at {redacted(url)} does not speak as a tracker does (HTTP {answer.status})"
            ) from error
