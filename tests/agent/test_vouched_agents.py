"""Blobs without a piece list, pulled by agents over real sockets with a real tracker: one copy from
upstream, and nothing is complete before the whole has matched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
from blake3 import blake3
from vouched_rig import Host, Site, is_whole, pull_all
from waits import until

from p2pdist.agent.pull.vouched_pull import VouchedPull
from p2pdist.core.pull import Event
from p2pdist.core.vouched.whole import Judge
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, DiskFull, NotFound, P2PDistError, Unavailable
from p2pdist.model.messages import Judged, KnownPieces, Reread, Vouched
from p2pdist.model.pieces import PieceList
from p2pdist.model.plan import Source
from p2pdist.store.blobs.blob import check_whole, require_vouched, vouch
from p2pdist.store.blobs.vouched_pieces import Listing, VouchedPieces
from p2pdist.store.store import BlobStore

PIECE = 64 << 10
COUNT = 100
DATA = random.Random(1).randbytes(COUNT * PIECE - 77)
BLOB = digest_of(DATA)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(tmp_path, stack)
        await made.start(DATA)
        yield made


def held(host: Host) -> int:
    blob = host.agent.store.get(BLOB)
    return len(blob.have) if blob is not None else 0


# -- as it should be


@pytest.mark.usefixtures("unhurried")
async def test_four_hosts_cost_upstream_one_copy(site: Site) -> None:
    hosts = await site.agents(4)
    blobs = await pull_all(hosts, DATA)
    assert all(is_whole(blob, DATA) for blob in blobs)
    assert site.upstream.copies == 1.0 and max(site.upstream.sent.values()) == 1
    assert sum(host.peers_bytes for host in hosts) >= 3 * len(DATA)


@pytest.mark.parametrize("size", [1, PIECE, 3 * PIECE + 1])
@pytest.mark.usefixtures("unhurried")
async def test_a_small_blob_comes_the_same_way(site: Site, size: int) -> None:
    data = site.upstream.data = random.Random(size).randbytes(size)
    hosts = await site.agents(3)
    assert all(is_whole(blob, data) for blob in await pull_all(hosts, data))
    assert site.upstream.copies == 1.0


async def test_an_empty_blob_is_complete_at_once(site: Site) -> None:
    host = await site.agent("h1")
    blob = await host.pull(b"")
    assert blob.complete and not site.upstream.sent


async def test_what_is_here_is_not_fetched_again(site: Site) -> None:
    host, other = await site.agents(2)
    await host.pull(DATA)
    sent = site.upstream.bytes_sent
    blob, pull = await host.begin(BLOB, len(DATA))
    assert pull is None and blob.complete
    assert is_whole(await other.pull(DATA), DATA), "a seed knows the list"
    assert site.upstream.bytes_sent == sent


@pytest.mark.usefixtures("unhurried")
async def test_a_host_joins_while_the_list_grows(site: Site) -> None:
    site.upstream.rate_bytes_s = 4e6
    first, second = await site.agents(2)
    pulling = asyncio.create_task(first.pull(DATA))
    await until(lambda: held(first) > COUNT // 3)
    assert is_whole(await second.pull(DATA), DATA)
    assert is_whole(await pulling, DATA) and site.upstream.copies == 1.0


# -- before the end


async def test_a_body_ends_only_when_the_whole_has_matched(site: Site) -> None:
    """The client gets what comes; the last piece not before the SHA-256 is known."""
    host = await site.agent("h1")
    gate = asyncio.Event()

    async def change(data: bytes, start: int) -> bytes:
        if start == (COUNT - 2) * PIECE:
            await gate.wait()
        return data

    site.upstream.change = change
    await host.begin(BLOB, len(DATA))
    got = bytearray()
    ranged: list[int] = []
    async with aiohttp.ClientSession() as http:

        async def ask_range() -> None:
            headers = {"Range": f"bytes={PIECE}-{3 * PIECE - 1}"}
            async with http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}", headers=headers) as answer:
                ranged.append(answer.status)
                assert await answer.read() == DATA[PIECE : 3 * PIECE]
                ranged.append(0)

        async with http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}") as answer:
            asking = asyncio.create_task(ask_range())
            while len(got) < (COUNT - 2) * PIECE:
                got += await answer.content.readany()
            await until(lambda: ranged == [206])
            assert len(got) == (COUNT - 2) * PIECE and ranged == [206], "nor does a part of it end"
            async with http.head(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}") as head:
                assert (head.status, head.headers["Content-Length"]) == (200, str(len(DATA)))
            gate.set()
            while chunk := await answer.content.readany():
                got += chunk
            await asking
    assert bytes(got) == DATA and ranged == [206, 0]


async def test_a_body_is_broken_off_when_what_was_sent_is_wrong(site: Site) -> None:
    """The client may not take for whole what is wrong in the middle."""
    host = await site.agent("h1")
    lies = True
    gate = asyncio.Event()

    async def change(data: bytes, start: int) -> bytes:
        if start == (COUNT - 1) * PIECE:
            await gate.wait()
        return bytes(len(data)) if start == 10 * PIECE and lies else data

    site.upstream.change = change
    _, pull = await host.begin(BLOB, len(DATA))
    assert pull is not None
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}") as answer:
            await answer.content.readexactly(50 * PIECE)
            lies = False
            gate.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                while await answer.content.readany():
                    pass
        await asyncio.wait_for(asyncio.shield(pull.done), 30)
        async with http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}") as answer:
            assert await answer.read() == DATA


async def test_a_body_is_broken_off_when_upstream_replaces_what_was_sent(site: Site) -> None:
    """Without a tracker: another host's version of a piece was stored, and sent to a client, while
    this host was reading the piece itself."""
    host = await site.agent("h1", tracked=False)
    reading, sent = asyncio.Event(), asyncio.Event()

    async def change(data: bytes, start: int) -> bytes:
        if start == 10 * PIECE:
            reading.set()
            await sent.wait()
        return data

    site.upstream.change = change
    blob, pull = await host.begin(BLOB, len(DATA))
    assert pull is not None and pull.vouched is not None
    await asyncio.wait_for(reading.wait(), 30)
    pull.vouched.list.suggest(Listing(0, (10,), blake3(bytes(PIECE)).digest()))
    assert await asyncio.to_thread(blob.write, 10, bytes(PIECE))
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}") as answer,
    ):
        got = await asyncio.wait_for(answer.content.readexactly(11 * PIECE), 30)
        assert got[10 * PIECE :] == bytes(PIECE)
        sent.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            while await answer.content.readany():
                pass
    await asyncio.wait_for(asyncio.shield(pull.done), 30)
    assert is_whole(blob, DATA)


# -- lies


def lying(host: Host, *pieces: int) -> None:
    """Have a host get other bytes of these pieces than upstream sends, which it believes."""

    def change(data: bytes, start: int) -> bytes:
        return bytes(len(data)) if not pieces or start // PIECE in pieces else data

    host.upstream.change = change


@pytest.mark.parametrize("pieces", [pytest.param((), marks=pytest.mark.slow), (7,), (90, 91)])
async def test_a_lying_host_costs_a_reading_and_its_name(site: Site, pieces: tuple[int, ...]) -> None:
    """All others complete, with the right bytes; the liar is known and reads no more."""
    hosts = await site.agents(4)
    liar = hosts[0]
    lying(liar, *pieces)
    begun = asyncio.create_task(pull_all([liar], DATA))
    await until(lambda: liar.upstream.bytes_read > 0)
    blobs = await pull_all(hosts[1:], DATA)
    assert all(is_whole(blob, DATA) for blob in blobs), blobs
    assert site.upstream.copies <= 4, "what the liar read, what the arbiter does, and what roots read meanwhile"
    (result,) = await begun
    assert is_whole(result, DATA), "it has what the others have"
    assert site.liars in ([], ["h1"])
    assert pieces or site.liars == ["h1"]


class Recorder:
    """What a pull is for its vouched side: upstream sends the first pieces, and hangs then."""

    def __init__(self) -> None:
        self.sent: list[Vouched | Judged] = []
        self.ended: list[P2PDistError] = []
        self.send, self.fail = self.sent.append, self.ended.append

    def submit(self, event: Event) -> None:
        pass

    def lost(self, pieces: Sequence[int]) -> None:
        pass

    def stored(self, piece: int) -> None:
        pass

    async def read_upstream(self, piece: int) -> bytes:
        if piece >= 10:
            await asyncio.Event().wait()
        return DATA[piece * PIECE : (piece + 1) * PIECE]

    async def ask_list(self, source: Source, known: VouchedPieces) -> Listing | None:
        return None


async def test_an_arbiter_that_becomes_whole_on_the_way_states_the_rest(tmp_path: Path) -> None:
    """Its pull ends with that, and later it knows no round that the tracker could be told of."""
    store = BlobStore(tmp_path)
    blob = store.begin_vouched(BLOB, len(DATA))
    for piece in range(COUNT):
        vouch(blob, piece, DATA[piece * PIECE : (piece + 1) * PIECE])
    recorder = Recorder()
    pull = VouchedPull(blob, require_vouched(blob), recorder)
    pull.receive(Reread(BLOB, 1))
    await until(lambda: any(isinstance(each, Vouched) and 9 in each.pieces for each in recorder.sent))
    assert (await asyncio.to_thread(check_whole, blob)).matches
    pull.carry_out(Judge(True, 1))
    pull.close()
    *stated, judged = recorder.sent
    assert judged == Judged(BLOB, 1, True)
    assert {piece for each in stated if isinstance(each, Vouched) and each.round == 1 for piece in each.pieces} == {
        *range(COUNT)
    }
    store.close()


async def test_the_right_bytes_come_although_upstream_was_wrong_for_a_while(site: Site) -> None:
    hosts = await site.agents(3)
    wrong = {5, 6, 70}

    def change(data: bytes, start: int) -> bytes:
        piece = start // PIECE
        if piece in wrong:
            wrong.discard(piece)
            return bytes(len(data))
        return data

    site.upstream.change = change
    blobs = await pull_all(hosts, DATA)
    assert all(is_whole(blob, DATA) for blob in blobs), blobs


async def test_wrong_bytes_of_upstream_are_never_complete(site: Site) -> None:
    hosts = await site.agents(3)
    site.upstream.change = lambda data, start: bytes(len(data)) if start == 5 * PIECE else data
    results = await pull_all(hosts, DATA)
    for host, result in zip(hosts, results, strict=True):
        assert isinstance(result, Corrupt) and "upstream" in str(result), result
        blob = host.agent.store.get(BLOB)
        assert blob is None or not blob.complete
    assert site.upstream.copies < 8


async def test_a_disk_that_turns_a_bit_is_no_lie(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdist.agent.pull.vouched_pull.FOLLOW_BYTES", 1 << 40)  # all is summed in the end
    host, other = await site.agents(2)
    gate = asyncio.Event()

    async def change(data: bytes, start: int) -> bytes:
        if start == (COUNT - 1) * PIECE:
            await gate.wait()
        return data

    site.upstream.change = change
    pulling = asyncio.create_task(pull_all([host, other], DATA))
    await until(lambda: held(host) == held(other) == COUNT - 1)
    blob = host.agent.store.get(BLOB)
    assert blob is not None
    with blob.path.open("r+b") as file:
        file.seek(3 * PIECE)
        file.write(b"\0" * 10)
    gate.set()
    assert all(is_whole(blob, DATA) for blob in await pulling)
    assert not site.liars


# -- upstream


@pytest.mark.slow
async def test_an_upstream_that_hangs_for_one_host_is_read_by_another(site: Site) -> None:
    first, second = await site.agents(2)
    stuck = asyncio.Event()
    honest = first.upstream.read_range

    async def hang(digest: object, start: int, length: int) -> bytes:
        if start >= 20 * PIECE:
            await stuck.wait()
        return await honest(digest, start, length)  # type: ignore[arg-type]

    first.upstream.read_range = hang  # type: ignore[method-assign]
    begun = asyncio.create_task(pull_all([first], DATA))
    await until(lambda: held(first) >= 10)
    assert is_whole(await second.pull(DATA), DATA)
    assert is_whole((await begun)[0], DATA)
    stuck.set()


async def test_an_upstream_that_has_it_no_more_ends_the_pull(site: Site) -> None:
    host = await site.agent("h1")

    async def gone(digest: object, start: int, length: int) -> bytes:
        raise NotFound("the registry has no such blob")

    host.upstream.read_range = gone  # type: ignore[method-assign]
    with pytest.raises(NotFound, match="no such blob"):
        await host.pull(DATA)


async def test_a_blob_of_another_length_is_said_at_once(site: Site) -> None:
    """A manifest may state any size: what upstream has is shorter."""
    hosts = await site.agents(2)
    longer = len(DATA) + 3 * PIECE
    site.upstream.data = DATA

    async def pull(host: Host) -> P2PDistError:
        _, pull = await host.begin(BLOB, longer)
        assert pull is not None
        with pytest.raises(P2PDistError) as caught:
            await asyncio.wait_for(asyncio.shield(pull.done), 60)
        return caught.value

    for error in await asyncio.gather(*map(pull, hosts)):
        assert isinstance(error, Corrupt | Unavailable), error
    await until(lambda: all(host.agent.store.get(BLOB) is None for host in hosts))


async def test_short_answers_are_no_pieces(site: Site) -> None:
    host = await site.agent("h1")
    short = {3, 4}

    def change(data: bytes, start: int) -> bytes:
        piece = start // PIECE
        if piece in short:
            short.discard(piece)
            return data[:-1]
        return data

    host.upstream.change = change
    assert is_whole(await host.pull(DATA), DATA)


async def test_a_full_disk_is_said_at_once(site: Site) -> None:
    host = await site.agent("h1", capacity_bytes=COUNT // 2 * PIECE)
    with pytest.raises(DiskFull):
        await host.begin(BLOB, len(DATA))
    assert not site.upstream.sent


# -- ends and beginnings


async def test_a_holder_that_dies_is_replaced(site: Site) -> None:
    """What it read is listed; what it had not read is read by another host."""
    site.upstream.rate_bytes_s = 4e6
    hosts = await site.agents(3)
    pulls = [asyncio.create_task(host.pull(DATA)) for host in hosts]
    await until(lambda: min(map(held, hosts)) > 20)
    reader = max(hosts, key=lambda host: host.upstream.bytes_read)
    await reader.stop()
    rest = [pull for host, pull in zip(hosts, pulls, strict=True) if host is not reader]
    assert all(is_whole(blob, DATA) for blob in await asyncio.gather(*rest))
    assert site.upstream.copies < 1.6
    await asyncio.gather(*pulls, return_exceptions=True)


@pytest.mark.slow
async def test_an_agent_that_is_started_again_goes_on(site: Site) -> None:
    """Alone, and when its tracker has forgotten the list: it vouches for what it read, again."""
    site.upstream.rate_bytes_s = 4e6
    host = await site.agent("h1")
    pulling = asyncio.create_task(pull_all([host], DATA))
    await until(lambda: held(host) > 30)
    await host.stop()
    await pulling
    read = host.upstream.bytes_read
    again = await site.agent("h1")
    assert is_whole(await again.pull(DATA), DATA)
    assert read + again.upstream.bytes_read <= len(DATA) + 16 * PIECE


@pytest.mark.slow
async def test_what_came_from_a_host_that_is_gone_is_read_again(site: Site) -> None:
    """Nobody vouches for it any more."""
    site.upstream.rate_bytes_s = 4e6
    first, second = await site.agents(2)
    pulls = asyncio.gather(pull_all([first], DATA), pull_all([second], DATA))
    await until(lambda: min(held(first), held(second)) > 30)
    await first.stop()
    await second.stop()
    await pulls
    await site.stop_tracker()
    await site.start_tracker()
    again = await site.agent("h2")
    assert is_whole(await again.pull(DATA), DATA)


async def test_a_tracker_that_is_lost_and_comes_back_learns_the_list(site: Site) -> None:
    site.upstream.rate_bytes_s = 3e6
    hosts = await site.agents(3)
    pulling = asyncio.create_task(pull_all(hosts, DATA))
    await until(lambda: min(map(held, hosts)) > 20)
    await site.stop_tracker()
    await until(lambda: not any(host.agent.session.connected for host in hosts))
    await site.start_tracker()
    assert all(is_whole(blob, DATA) for blob in await pulling)
    assert site.upstream.copies <= 1.5
    assert not site.liars


async def test_pulls_end_without_the_tracker_that_began_them(site: Site) -> None:
    """Hosts ask those that they receive from for their list."""
    site.upstream.rate_bytes_s = 3e6
    hosts = await site.agents(3)
    pulling = asyncio.create_task(pull_all(hosts, DATA, within_s=90))
    await until(lambda: min(map(held, hosts)) > 20)
    await site.stop_tracker()
    assert all(is_whole(blob, DATA) for blob in await pulling)
    assert site.upstream.copies < 3


async def test_without_a_tracker_a_host_reads_alone(site: Site) -> None:
    host = await site.agent("h1", tracked=False)
    assert is_whole(await host.pull(DATA), DATA)
    assert site.upstream.copies == 1.0


async def test_a_tracker_that_does_not_answer_is_not_waited_for_long(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdist.agent.pull.registry.UPSTREAM_WAIT_S", 0.2)
    await site.stop_tracker()
    site._tracker = None
    host = await site.agent("h1")
    assert is_whole(await host.pull(DATA), DATA)


# -- asking others


async def test_agents_say_what_they_know_of_a_list(site: Site) -> None:
    host = await site.agent("h1")
    gate = asyncio.Event()

    async def change(data: bytes, start: int) -> bytes:
        if start >= 30 * PIECE:
            await gate.wait()
        return data

    site.upstream.change = change
    pulling = asyncio.create_task(host.pull(DATA))
    await until(lambda: held(host) == 30)
    right = PieceList.of_stream(__import__("io").BytesIO(DATA), len(DATA))
    async with aiohttp.ClientSession() as http:

        async def ask(first: str) -> tuple[int, bytes]:
            url = f"http://127.0.0.1:{host.port}/v1/blobs/{BLOB}/pieces"
            async with http.get(url, params={"first": first}) as answer:
                return answer.status, await answer.read()

        known = msgspec.msgpack.decode((await ask("10"))[1], type=KnownPieces)
        assert known == KnownPieces(tuple(range(10, 30)), right.hashes[320 : 30 * 32])
        assert (await ask("-1"))[0] == (await ask("x" * 20))[0] == 400
        gate.set()
        await pulling
        known = msgspec.msgpack.decode((await ask("98"))[1], type=KnownPieces)
        assert known == KnownPieces((98, 99), right.hashes[98 * 32 :], whole=True)
        assert msgspec.msgpack.decode((await ask("1000"))[1], type=KnownPieces).pieces == ()
        async with http.get(f"http://127.0.0.1:{host.port}/v1/blobs/{digest_of(b'')}/pieces") as answer:
            assert answer.status == 404


async def test_a_pull_that_fails_is_no_complete_blob(site: Site) -> None:
    host = await site.agent("h1")
    _, pull = await host.begin(BLOB, len(DATA))
    assert pull is not None
    pull.reject(Unavailable("as a test says"))
    with pytest.raises(P2PDistError):
        await pull.done
    await asyncio.sleep(0)
    blob = host.agent.store.get(BLOB)
    assert blob is not None and not blob.complete
    assert is_whole(await host.pull(DATA), DATA)
