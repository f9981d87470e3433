"""Announces, scrapes and torrents over real sockets: what clients may send and what they must not,
byte for byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import libtorrent
import pytest
from effort import examples
from formats_rig import torrent_info
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torrent_rig import TorrentSite, announce_query, content, torrent_site

from p2pdist.model.bencode import encode
from p2pdist.model.digest import digest_of, hex_of
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding
from p2pdist.model.torrent import decode_torrent
from tracker import joined_reads
from tracker.core.bittorrent.announce import NUMWANT, AnnounceAnswer, Contact
from tracker.core.events import Received, SessionClosed
from tracker.http.bittorrent import FIELDS_MAX, SCRAPE_MAX, announce_of, encode_answer, parse_query

PIECE = 64 << 10
EVERY_BYTE = [bytes(range(start, start + 16)) + b"%&=+" for start in range(0, 256, 16)]
HASH = EVERY_BYTE[0]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[TorrentSite]:
    async with torrent_site(tmp_path) as found:
        for info_hash in EVERY_BYTE:
            found.service.announces.register((info_hash,))
        yield found


# -- announces


async def test_two_peers_find_each_other(site: TorrentSite) -> None:
    first = await site.ask("/announce", announce_query(HASH, peer_id=b"a" * 20, port=1000, event="started"))
    assert first == {b"interval": 30, b"min interval": 30, b"complete": 0, b"incomplete": 1, b"peers": b""}
    second = await site.ask("/announce", announce_query(HASH, peer_id=b"b" * 20, port=1001, left=0))
    assert second[b"peers"] == b"\x7f\x00\x00\x01\x03\xe8" and (second[b"complete"], second[b"incomplete"]) == (1, 1)


async def test_info_hashes_of_any_bytes_arrive_as_they_are(site: TorrentSite) -> None:
    """As clients escape them: everything, only what must be, or in lower case."""
    for number, info_hash in enumerate(EVERY_BYTE):
        everything = "".join(f"%{byte:02x}" for byte in info_hash)
        for text in (quote(info_hash, safe=""), everything, quote(info_hash, safe="!*'()~+")):
            said = announce_query(HASH, port=1000 + number).replace(quote(HASH, safe=""), text, 1)
            answer = await site.ask("/announce", said)
            assert answer.get(b"incomplete") == 1, (text, answer)


async def test_without_compact_peers_are_a_list(site: TorrentSite) -> None:
    await site.ask("/announce", announce_query(HASH, peer_id=b"a" * 20, port=1000))
    second = announce_query(HASH, peer_id=b"b" * 20, port=1001, compact=0)
    peer = {b"ip": b"127.0.0.1", b"port": 1000}
    assert (await site.ask("/announce", second))[b"peers"] == [peer | {b"peer id": b"a" * 20}]
    assert (await site.ask("/announce", second + "&no_peer_id=1"))[b"peers"] == [peer]


def test_addresses_of_both_families() -> None:
    """BEP 23 and BEP 7: 6 bytes each in peers, 18 in peers6."""
    four, six = Contact(b"a" * 20, b"\x0a\0\0\1", 258), Contact(b"", bytes(15) + b"\1", 1)
    answer = AnnounceAnswer(30, 30, 1, 1, (four, six), "full")
    assert encode(encode_answer(answer, compact=True, ids=True)) == (
        b"d8:completei1e10:incompletei1e8:intervali30e12:min intervali30e"
        b"5:peers6:\x0a\0\0\1\1\2" + b"6:peers618:" + bytes(15) + b"\1\0\1" + b"15:warning message4:fulle"
    )
    assert encode_answer(answer, compact=False, ids=True)[b"peers"] == [
        {b"peer id": b"a" * 20, b"ip": b"10.0.0.1", b"port": 258},
        {b"ip": b"::1", b"port": 1},
    ]


@pytest.mark.parametrize(
    ("ip", "seen"),
    [("10.1.2.3", "10.1.2.3"), ("8.8.8.8", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("255.255.255.255", "127.0.0.1"),
     ("host.example", "127.0.0.1"), ("%ff", "127.0.0.1"), ("", "127.0.0.1"), ("169.254.1.1", "127.0.0.1")],
)  # fmt: skip
async def test_a_client_on_this_machine_may_name_a_private_address(site: TorrentSite, ip: str, seen: str) -> None:
    await site.ask("/announce", announce_query(HASH, peer_id=b"a" * 20) + f"&ip={ip}")
    answer = await site.ask("/announce", announce_query(HASH, peer_id=b"b" * 20, port=1, compact=0))
    assert [peer[b"ip"].decode() for peer in answer[b"peers"]] == [seen]


def test_no_other_client_may() -> None:
    fields = parse_query(announce_query(HASH) + "&ip=10.1.2.3")
    assert announce_of(fields, b"\x0a\6\6\6").ip == b"\x0a\6\6\6"
    assert announce_of(fields, b"\x08\x08\x08\x08").ip == b"\x08\x08\x08\x08"


GOOD = {"info_hash": HASH, "peer_id": b"p" * 20, "port": b"6881", "left": b"1"}
WRONG: dict[str, dict[str, bytes | None]] = {
    "no info hash": {"info_hash": None},
    "a short info hash": {"info_hash": HASH[:19]},
    "a whole SHA-256": {"info_hash": HASH + bytes(12)},
    "an info hash in digits": {"info_hash": HASH.hex().encode()},
    "no peer id": {"peer_id": None},
    "a long peer id": {"peer_id": b"p" * 21},
    "no port": {"port": None},
    "port 0": {"port": b"0"},
    "port 65536": {"port": b"65536"},
    "a negative port": {"port": b"-1"},
    "a port with blanks": {"port": b" 1"},
    "a port of many digits": {"port": b"1" * 5000},
    "digits of another script": {"port": "\u0661".encode()},
    "nothing left to tell": {"left": None},
    "negative left": {"left": b"-1"},
    "left with a fraction": {"left": b"1.5"},
    "wrong uploaded": {"uploaded": b"x"},
    "wrong downloaded": {"downloaded": b""},
    "another event": {"event": b"exploded"},
    "a long key": {"key": b"k" * 65},
    "a wrong numwant": {"numwant": b"many"},
    "a numwant of many digits": {"numwant": b"9" * 100},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
async def test_a_malformed_announce_is_told_why(site: TorrentSite, change: dict[str, bytes | None]) -> None:
    said = {name: value for name, value in (GOOD | change).items() if value is not None}
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in said.items())
    answer = await site.ask("/announce", query)
    assert answer.keys() == {b"failure reason"} and 5 < len(answer[b"failure reason"]) < 200
    assert site.service.announces.peers == 0


@pytest.mark.parametrize("name", ["info_hash", "peer_id", "port", "left", "event", "compact", "ip", "numwant"])
async def test_a_field_that_comes_twice_is_refused(site: TorrentSite, name: str) -> None:
    query = announce_query(HASH, event="", compact=1, ip="", numwant=1)
    again = next(part for part in query.split("&") if part.startswith(f"{name}="))
    answer = await site.ask("/announce", f"{query}&{again}")
    assert name.encode() in answer[b"failure reason"] and site.service.announces.peers == 0


async def test_what_real_clients_say_besides_is_passed_over(site: TorrentSite) -> None:
    more = "&corrupt=0&redundant=0&key=5A5C00F1&supportcrypto=1&trackerid=&ipv6=%5b%3a%3a1%5d&cryptoport=0&empty&=&&"
    query = announce_query(HASH, uploaded=1 << 40, downloaded=0, left=(1 << 64) - 1, event="empty", numwant=-1)
    assert (await site.ask("/announce", query + more))[b"incomplete"] == 1
    assert (await site.ask("/announce", query + "&x=1" * FIELDS_MAX)).keys() == {b"failure reason"}


async def test_an_announce_of_nothing_that_is_tracked(site: TorrentSite) -> None:
    for more in ("", f"&blob={digest_of(b'unknown')}", "&blob=nonsense", f"&package={digest_of(b'x')}"):
        answer = await site.ask("/announce", announce_query(b"?" * 20) + more)
        assert answer.keys() == {b"failure reason"}, more
    assert (await site.ask("/announce", ""))[b"failure reason"]


async def test_numwant_is_kept_within_its_limits(site: TorrentSite) -> None:
    for number in range(60):
        await site.ask("/announce", announce_query(HASH, peer_id=b"%020d" % number, port=1000 + number, numwant=0))
    for numwant, count in (("", NUMWANT), ("&numwant=0", 0), ("&numwant=3", 3), ("&numwant=999999999", 60)):
        answer = await site.ask("/announce", announce_query(HASH, peer_id=b"z" * 20, port=1) + numwant)
        assert len(answer[b"peers"]) == 6 * count


# -- scrapes


async def test_a_scrape_tells_of_those_that_are_named(site: TorrentSite) -> None:
    await site.ask("/announce", announce_query(HASH))
    await site.ask("/announce", announce_query(HASH, left=0, event="completed"))
    named = "&".join(f"info_hash={quote(info_hash, safe='')}" for info_hash in (HASH, EVERY_BYTE[1], b"?" * 20))
    assert await site.ask("/scrape", named) == {
        b"files": {
            HASH: {b"complete": 1, b"downloaded": 1, b"incomplete": 0},
            EVERY_BYTE[1]: {b"complete": 0, b"downloaded": 0, b"incomplete": 0},
        }
    }


async def test_a_scrape_names_a_limited_number(site: TorrentSite) -> None:
    named = "info_hash=" + quote(HASH, safe="")
    assert list((await site.ask("/scrape", "&".join([named] * SCRAPE_MAX)))[b"files"]) == [HASH]
    for query in ("", "info_hash=", "info_hash=abc", "&".join([named] * (SCRAPE_MAX + 1))):
        assert (await site.ask("/scrape", query)).keys() == {b"failure reason"}


# -- whatever is sent


QUERIES = st.lists(
    st.tuples(
        st.sampled_from(
            ["info_hash", "peer_id", "port", "left", "event", "numwant", "key", "ip", "compact", "blob", "x"]
        ),
        st.sampled_from([HASH, b"p" * 20, b"1", b"0", b"-1", b"started", b"stopped"]) | st.binary(max_size=30),
    ),
    max_size=12,
)


@given(QUERIES | st.text(max_size=60))
def test_a_query_is_an_announce_or_refused(sent: list[tuple[str, bytes]] | str) -> None:
    raw = sent if isinstance(sent, str) else "&".join(f"{name}={quote(value, safe='')}" for name, value in sent)
    try:
        event = announce_of(parse_query(raw), b"\x7f\0\0\1")
    except UsageError:
        return
    assert len(event.info_hash) == len(event.peer_id) == 20 and 0 < event.port < 65536 and event.left >= 0
    assert event.numwant is None or event.numwant >= 0


def test_a_query_of_other_characters_is_refused() -> None:
    for raw in ("info_hash=\udcff", "key=\u00e4"):
        with pytest.raises(UsageError, match="ASCII"):
            parse_query(raw)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(st.tuples(st.sampled_from(["/announce", "/scrape"]), QUERIES), max_size=8))
def test_whatever_is_sent_is_answered_by_a_dictionary(tmp_path: Path, paths: list[Any]) -> None:
    async def work() -> None:
        async with torrent_site(tmp_path) as found:
            found.service.announces.register((HASH,))
            for path, sent in paths:
                query = "&".join(f"{name}={quote(value, safe='')}" for name, value in sent)
                answer = await found.ask(path, query)
                assert b"failure reason" in answer or b"interval" in answer or b"files" in answer

    asyncio.run(work())


@pytest.mark.parametrize(
    "target", [b"info_hash=\xff\xfe", b"%", b"info_hash=%", b"info_hash=%zz%1", b"a=b?c#d", b"\xc3\xa4=1"]
)
async def test_bytes_that_no_client_sends(site: TorrentSite, target: bytes) -> None:
    """The request may be refused as no HTTP; the tracker goes on."""
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /announce?" + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head = (await asyncio.wait_for(reader.read(), 60)).split(b"\r\n")[0]
    writer.close()
    assert head in (b"HTTP/1.1 200 OK", b"HTTP/1.0 400 Bad Request", b"HTTP/1.1 400 Bad Request"), head
    assert (await site.ask("/announce", announce_query(HASH)))[b"incomplete"] == 1


# -- torrents


async def test_a_blob_has_a_torrent(site: TorrentSite) -> None:
    data = content(3 * PIECE + 5)
    digest = await site.publish(data)
    body = await site.get(f"/v1/blobs/{digest}/torrent")
    read = libtorrent.load_torrent_buffer(body)
    ours = decode_torrent(torrent_info_of(data))
    assert read.ti.name() == "weights.bin" and read.ti.total_size() == len(data)
    assert read.ti.info_hashes().v1.to_bytes() == ours.info_hash_v1
    assert read.trackers == [f"{site.url}/announce?blob={digest}"] and read.url_seeds == []
    for info_hash in (ours.info_hash_v1, ours.info_hash_v2[:20], ours.v1_only().info_hash_v1):
        assert info_hash in site.service.announces
    plain = libtorrent.load_torrent_buffer(await site.get(f"/v1/blobs/{digest}/torrent?version=1"))
    assert not plain.ti.info_hashes().has_v2() and plain.trackers == read.trackers


def torrent_info_of(data: bytes) -> bytes:
    return torrent_info(BytesIO(data), len(data), "weights.bin")


async def test_a_magnet_link_says_the_same(site: TorrentSite) -> None:
    data = content(PIECE + 1)
    digest = await site.publish(data)
    ours = decode_torrent(torrent_info_of(data))
    async with site.http.get(f"{site.url}/v1/blobs/{digest}/torrent?format=magnet") as answer:
        body = await answer.json()
    assert body["info_hash_v1"] == ours.info_hash_v1.hex() and body["info_hash_v2"] == ours.info_hash_v2.hex()
    assert (body["name"], body["size"]) == ("weights.bin", len(data))
    read = libtorrent.parse_magnet_uri(body["magnet"])
    assert read.info_hashes.v1.to_bytes() == ours.info_hash_v1 and read.info_hashes.v2.to_bytes() == ours.info_hash_v2
    assert read.trackers == [f"{site.url}/announce?blob={digest}"] and read.name == "weights.bin"
    fields = parse_qs(body["magnet"].removeprefix("magnet:?"))
    assert fields["xl"] == [str(len(data))] and "ws" not in fields
    async with site.http.get(f"{site.url}/v1/blobs/{digest}/torrent?format=magnet&version=1") as answer:
        plain = await answer.json()
    assert "btmh" not in plain["magnet"] and "info_hash_v2" not in plain


async def test_a_package_has_a_torrent_of_its_blobs(site: TorrentSite) -> None:
    blobs = [content(2 * PIECE + 1, 1), content(PIECE, 2), content(7, 3)]
    digest = await site.publish_package(parse_reference("team/trainer:v3"), blobs)
    for reference in ("team/trainer:v3", f"team/trainer@{digest}"):
        body = await site.get(f"/v1/packages/{reference}/torrent")
        read = libtorrent.load_torrent_buffer(body)
        files = read.ti.layout()
        listed = {
            files.file_path(at): files.file_size(at)
            for at in range(files.num_files())
            if ".pad" not in files.file_path(at)
        }
        assert listed == {f"sha256/{hex_of(digest_of(data))}": len(data) for data in blobs}
        assert read.trackers == [f"{site.url}/announce?package={digest}"]
    async with site.http.get(f"{site.url}/v1/packages/team/trainer:v3/torrent?format=magnet") as answer:
        assert (await answer.json())["size"] == sum(map(len, blobs))


async def test_what_was_pushed_without_a_torrent_has_none(site: TorrentSite) -> None:
    digest = await site.publish(content(100), torrent=False)
    await site.publish_package(parse_reference("a:v1"), [content(200)], torrent=False)
    for path in (f"/v1/blobs/{digest}/torrent", "/v1/packages/a:v1/torrent", f"/v1/blobs/{digest_of(b'no')}/torrent"):
        status, problem = await site.problem(path)
        assert status == 404 and "has no torrent" in problem["detail"] and "p2pdist torrent" in problem["remedy"], path
    assert (await site.problem("/v1/packages/b:v1/torrent"))[0] == 404
    assert (await site.problem("/v1/packages/B/torrent"))[0] == 400
    assert (await site.problem("/v1/blobs/nonsense/torrent"))[0] == 400


@pytest.mark.parametrize("kind", ["blob", "package", "announce"])
async def test_one_address_causes_a_bounded_number_of_misses(
    site: TorrentSite, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whoever reaches the tracker may ask for a torrent: each that is not there costs requests at
    central storage."""
    monkeypatch.setattr(joined_reads, "MISSES_BURST", 5)
    monkeypatch.setattr(joined_reads, "MISSES_PER_S", 0.001)
    answers = []
    for number in range(20):
        digest = digest_of(b"%d" % number)
        if kind == "announce":
            query = f"{announce_query(bytes(20))}&blob={digest}"
            answers.append((await site.ask("/announce", query))[b"failure reason"].decode())
        else:
            path = f"/v1/blobs/{digest}/torrent" if kind == "blob" else f"/v1/packages/team/none:{number}/torrent"
            answers.append((await site.problem(path))[1]["detail"])
    refused = ["asks for too much" in answer for answer in answers]
    assert refused == [False] * 6 + [True] * 14, answers


async def test_a_layer_of_a_package_may_have_its_own_torrent(site: TorrentSite) -> None:
    data = content(PIECE + 3)
    await site.publish_package(parse_reference("a:v1"), [data])
    assert await site.get(f"/v1/blobs/{digest_of(data)}/torrent")


async def test_a_torrent_of_something_else_is_corrupt(site: TorrentSite, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = content(PIECE + 3), torrent_info_of(content(PIECE + 4))
    monkeypatch.setattr("torrent_rig.torrent_info", lambda *_: other)
    monkeypatch.setattr("torrent_rig.package_torrent_info", lambda *_: other)
    digest = await site.publish(data)
    await site.publish_package(parse_reference("a:v1"), [data])
    for path in (f"/v1/blobs/{digest}/torrent", "/v1/packages/a:v1/torrent"):
        status, problem = await site.problem(path)
        assert status == 502 and "something else" in problem["detail"]
    monkeypatch.setattr("torrent_rig.torrent_info", lambda *_: b"no torrent at all")
    digest = await site.publish(content(99))
    assert (await site.problem(f"/v1/blobs/{digest}/torrent"))[0] == 502


async def test_how_a_torrent_is_asked_for(site: TorrentSite) -> None:
    digest = await site.publish(content(100))
    for query in ("version=3", "format=json"):
        assert (await site.problem(f"/v1/blobs/{digest}/torrent?{query}"))[0] == 400
    for host, status in (
        ("tracker.example:7070", 200),
        ("[fd00::1]:7070", 200),
        ("a b", 400),
        ("x/../y", 400),
        ("h:999999", 400),
    ):
        async with site.http.get(f"{site.url}/v1/blobs/{digest}/torrent", headers={"Host": host}) as answer:
            assert answer.status == status, host
            body = await answer.read()
            assert (
                status != 200
                or f"8:announce{len(host) + 22 + len(digest)}:http://{host}/announce?blob=".encode() in body
            )


async def test_agents_that_hold_the_blob_are_web_seeds_and_peers(site: TorrentSite) -> None:
    data = content(PIECE)
    digest = await site.publish(data)
    service = site.service
    for number, count in ((1, 1), (2, 0), (3, 1)):
        hello = Hello(PROTOCOL_VERSION, f"h{number}", f"10.0.0.{number}:7071", bt_port=6999 if number < 3 else 0)
        session, _ = service.open_session(hello)
        service.submit(Received(session, Holding(digest, PIECE, PIECE, (count,))))
    service.submit(SessionClosed(session))
    read = libtorrent.load_torrent_buffer(await site.get(f"/v1/blobs/{digest}/torrent"))
    assert read.url_seeds == [f"http://10.0.0.1:7071/v1/blobs/{digest}"]
    answer = await site.ask("/announce", announce_query(read.ti.info_hashes().v1.to_bytes()))
    assert (answer[b"complete"], answer[b"incomplete"]) == (1, 2)
    found = re.findall(rb"(?s)\x0a\0\0(.)\x1b\x57", answer[b"peers"])
    assert found == [b"\1", b"\2"] and len(answer[b"peers"]) == 12


async def test_a_web_origin_is_a_web_seed(tmp_path: Path) -> None:
    async with torrent_site(tmp_path, web_origin="http://cache.example/layout/") as site:
        digest = await site.publish(content(100))
        await site.publish_package(parse_reference("a:v1"), [content(200)])
        blob = libtorrent.load_torrent_buffer(await site.get(f"/v1/blobs/{digest}/torrent"))
        assert blob.url_seeds == [f"http://cache.example/layout/blobs/sha256/{hex_of(digest)}"]
        package = libtorrent.load_torrent_buffer(await site.get("/v1/packages/a:v1/torrent"))
        assert package.url_seeds == ["http://cache.example/layout/blobs/"], "the client adds sha256/<hex>"


async def test_a_tracker_that_was_started_again_learns_from_an_announce(tmp_path: Path) -> None:
    async with torrent_site(tmp_path) as site:
        blob = await site.publish(content(100))
        package = await site.publish_package(parse_reference("a:v1"), [content(200), content(300)])
        paths = {f"blob={blob}": f"/v1/blobs/{blob}/torrent", f"package={package}": "/v1/packages/a:v1/torrent"}
        torrents = {about: await site.get(path) for about, path in paths.items()}
    async with torrent_site(tmp_path) as site:
        for about, body in torrents.items():
            read = libtorrent.load_torrent_buffer(body)
            assert read.trackers[0].endswith(f"/announce?{about}")
            hashes = read.ti.info_hashes()
            query = announce_query(hashes.v2.to_bytes()[:20])
            assert b"failure reason" in await site.ask("/announce", query)
            assert b"failure reason" in await site.ask("/announce", f"{about}&{announce_query(b'?' * 20)}")
            assert (await site.ask("/announce", f"{about}&{query}"))[b"incomplete"] == 1
            assert (await site.ask("/announce", announce_query(hashes.v1.to_bytes())))[b"incomplete"] == 1
