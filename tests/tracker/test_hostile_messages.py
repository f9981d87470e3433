"""What any process may send to a tracker: it goes on, answers no 5xx, and forgets what came."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
from aiohttp import web
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pdist.model.digest import digest_of
from p2pdist.model.messages import (
    PROTOCOL_VERSION,
    Advance,
    Complaint,
    Hello,
    Holding,
    Holdings,
    Leaving,
    Left,
    Report,
    encode,
)
from p2pdist.model.pieces import PieceLayout
from tracker.content import Content
from tracker.core.events import Described, Due, Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet
from tracker.http.app import make_app
from tracker.service import Service

PIECE = 65536
BLOBS = [digest_of(b"%d" % number) for number in range(4)]
HOSTS = ["h1", "h2", "h3", "h4"]
NAMES = st.sampled_from([*HOSTS, "nobody", ""])
COUNTS = st.lists(st.sampled_from([0, 1, 3, 7, 8, 9, 1 << 62]), max_size=4).map(tuple)
HOLDING = st.builds(
    Holding,
    st.sampled_from(BLOBS),
    st.sampled_from([0, 1, PIECE, 8 * PIECE, 8 * PIECE, 16 * PIECE, 32 * PIECE - 1, 1 << 62]),
    st.sampled_from([0, 1, 3, PIECE, PIECE, PIECE, 2 * PIECE, 1 << 40]),
    COUNTS,
    st.lists(st.none() | NAMES, max_size=4).map(tuple),
    st.sampled_from(["start", "preseed"]),
    st.booleans(),
)
ADVANCE = st.builds(Advance, st.sampled_from(BLOBS), COUNTS, yields=st.booleans())
REASONS = st.sampled_from(
    ["refused", "reset", "short", "stalled", "slow", "corrupt", "protocol", "missing", "busy", "unavailable"]
)
MESSAGE = st.one_of(
    HOLDING,
    HOLDING,
    st.builds(Holdings, st.lists(HOLDING, max_size=5).map(tuple)),
    st.builds(Report, st.lists(ADVANCE, max_size=3).map(tuple), st.sampled_from([0, 1, 1 << 40]), st.floats(0, 10)),
    st.builds(Complaint, st.sampled_from(BLOBS), st.integers(0, 5), NAMES, REASONS, nameless=st.booleans()),
    st.builds(Left, st.sampled_from(BLOBS)),
    st.just(Leaving()),
    st.just(Hello(PROTOCOL_VERSION, "h1", "h1:1")),
)
HELLO = st.builds(
    Hello,
    st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, 0]),
    st.sampled_from(HOSTS),
    st.sampled_from(["10.0.0.1:1", "h1:1"]),
    st.sampled_from(["", "z1", "z2"]),
    st.sampled_from(["", "r1", "r2"]),
)
EVENT = st.one_of(
    st.builds(Received, st.integers(1, 6), MESSAGE),
    st.builds(Received, st.integers(1, 6), MESSAGE),
    st.builds(Received, st.integers(1, 6), MESSAGE),
    st.builds(SessionOpened, st.integers(1, 6), HELLO, st.sampled_from(["", "10.0.0.1"])),
    st.builds(SessionClosed, st.integers(1, 6)),
    st.just(Tick()),
    st.just(Due()),
    st.builds(lambda blob: Described(((blob, PieceLayout(8 * PIECE, PIECE)),)), st.sampled_from(BLOBS)),
)


@settings(
    max_examples=examples(500), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    st.lists(st.tuples(EVENT, st.sampled_from([0.0, 0.05, 0.3, 3.0])), max_size=60),
    st.sampled_from([-100.0, 0.0]),
    st.sampled_from([1, 64]),
)
def test_no_sequence_of_messages_breaks_the_core_and_nothing_stays_of_it(
    events: list[tuple[Any, float]], started_at: float, leases: int
) -> None:
    fleet, now = Fleet(started_at, origin_streams_max=leases), 0.0
    for number, host in enumerate(HOSTS, 1):
        fleet.handle(SessionOpened(number, Hello(PROTOCOL_VERSION, host, f"{host}:1")), now=now)
    opened = set(range(1, 5))
    for event, after_s in events:
        now += after_s
        if isinstance(event, SessionOpened):
            if event.session in opened:
                continue
            opened.add(event.session)
        fleet.handle(event, now=now)
        fleet.handle(Tick(), now=now)
    for session in range(7):
        fleet.handle(SessionClosed(session), now=now)
    for _ in range(80):
        now += 0.3
        fleet.handle(Tick(), now=now)
    assert not fleet.swarms and not fleet.hosts and not fleet.schedule.restless
    assert not fleet._turnover.waiting and not list(fleet._turnover.reading())


def hostile(random_: random.Random) -> str | bytes:
    """A message that no agent says, or one that almost is one."""
    document: Any = json.loads(encode(random_.choice([
        Hello(PROTOCOL_VERSION, "h1", "h1:1"),
        Holding(BLOBS[0], 8 * PIECE, PIECE, (0,), ("h1",)),
        Holdings((Holding(BLOBS[1], 8 * PIECE, PIECE, (8,)),)),
        Report((Advance(BLOBS[0], (1,)),)),
        Complaint(BLOBS[0], 0, "h2", "stalled"),
        Left(BLOBS[0]),
        Leaving(),
    ])))  # fmt: skip
    junk = [
        None,
        -1,
        1 << 70,
        1e308,
        "",
        "\0",
        "x" * 5000,
        [],
        {},
        [[[]]],
        True,
        "sha256:" + "g" * 64,
        {"type": "hello"},
    ]
    for _ in range(random_.randrange(3)):
        document[random_.choice([*document, "other"])] = random_.choice(junk)
    text = json.dumps(document)
    cut = random_.randrange(len(text))
    return random_.choice(
        [
            text,
            text,
            text,
            text[:cut],
            text[:cut].encode() + b"\xff\xfe",
            "[" * 5000,
            "\ud800x".encode("utf-8", "replace"),
        ]
    )


async def test_no_message_or_request_is_answered_by_a_failure_of_the_tracker() -> None:
    service = Service(Fleet(asyncio.get_running_loop().time()), Content(None))
    runner = web.AppRunner(make_app(service), shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, random_ = f"http://127.0.0.1:{runner.addresses[0][1]}", random.Random(1)
    try:
        async with aiohttp.ClientSession() as http:
            for number in range(examples(300)):
                async with http.ws_connect(f"{url}/v1/session") as socket:
                    if number % 3:
                        await socket.send_str(encode(Hello(PROTOCOL_VERSION, f"h{number % 5}", "127.0.0.1:1")).decode())
                    for _ in range(random_.randrange(1, 5)):
                        message = hostile(random_)
                        await (socket.send_str if isinstance(message, str) else socket.send_bytes)(message)  # type: ignore[arg-type]
            paths = [
                "packages",
                "resolve",
                "content/x",
                "layers/x",
                "hosts/x",
                "hosts/x/reachability",
                "swarms/x",
                "swarms/x/story",
                "blobs/x/torrent",
            ]
            for path in paths:
                for query in (
                    "",
                    "?reference=%00",
                    "?reference=" + "a" * 5000,
                    "?zone=%ff",
                    "?as=manifest",
                    "?stripe=-1",
                ):
                    for digest in ("x", "sha256:" + "0" * 64, "%2e%2e%2f", "%00"):
                        async with http.get(f"{url}/v1/{path.replace('x', digest, 1)}{query}") as answer:
                            assert answer.status < 500 or answer.status == 503, (
                                path,
                                digest,
                                query,
                                await answer.text(),
                            )
            while service.sessions:
                await asyncio.sleep(0.01)
            async with http.get(f"{url}/healthz") as answer:
                assert answer.status == 200
    finally:
        await runner.cleanup()
