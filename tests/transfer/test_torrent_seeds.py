"""Complete blobs are seeded from the store's own files, which nobody writes to and which can be let
go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from swarm_rig import Aria, Events, Sample, open_files, sample, seed_of, stopped, stored, wait_until

from p2pdist.store.blobs.blob import Blob, content_digest
from p2pdist.store.store import BlobStore
from p2pdist.transfer.torrent.seeds import TorrentSeeds
from p2pdist.transfer.torrent.session import TorrentSession
from p2pdist.transfer.torrent.settings import TorrentSettings
from p2pdist.transfer.torrent.swarm import Swarm
from p2pdist.transfer.torrent.transfer import TorrentTransfer

COUNT = 24


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def started(stack: ExitStack) -> TorrentSession:
    session = TorrentSession(TorrentSettings("127.0.0.1", 0))
    session.start()
    stack.callback(session.close)
    return session


def opened(stack: ExitStack, root: Path) -> BlobStore:
    store = BlobStore(root)
    stack.callback(store.close)
    return store


@pytest.mark.slow
def test_aria2_fetches_a_seeded_blob(stack: ExitStack, tmp_path: Path) -> None:
    """Of the store's file nothing changes, and there is no second one."""
    found = sample(1, COUNT)
    store, session = opened(stack, tmp_path / "store"), started(stack)
    blob = stored(store, found)
    before, listed = blob.path.stat(), sorted((tmp_path / "store").rglob("*"))
    aria = Aria(tmp_path / "aria", found, seed=False)
    stack.callback(aria.stop)
    aria.wait_listening()
    seeds = TorrentSeeds(session)
    seeds.keep([seed_of(blob, aria.torrent, swarm=Swarm(peers=(aria.address,)))])
    wait_until(lambda: aria.has(found.data), "aria2 to have it all")
    assert seeds.release(blob.digest)
    after = blob.path.stat()
    assert (after.st_ino, after.st_size, after.st_mode, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mode,
        before.st_mtime_ns,
    )
    assert after.st_mode & 0o777 == 0o444
    assert sorted((tmp_path / "store").rglob("*")) == listed
    wait_until(lambda: session.sent_bytes >= len(found.data), "the count of what was sent")


def test_one_agent_fetches_what_another_seeds(stack: ExitStack, tmp_path: Path) -> None:
    """Both versions of the protocol in one torrent; then the receiver seeds it to a third."""
    found = sample(2, COUNT)
    blob = stored(opened(stack, tmp_path / "0"), found)
    for number in (1, 2):
        session = started(stack)
        TorrentSeeds(session).keep([seed_of(blob, found.torrent)])
        store = opened(stack, tmp_path / str(number))
        copy, events = store.begin(found.digest, found.pieces), Events()
        swarm = Swarm(peers=(("127.0.0.1", session.port),))
        TorrentTransfer(started(stack), copy, found.torrent, swarm, events).start()
        assert events.closed().reason == "done"
        copy.finish()
        assert content_digest(copy) == found.digest
        blob = copy


def test_the_most_recently_used_are_seeded(stack: ExitStack, tmp_path: Path) -> None:
    """Up to the limit; who falls out of it goes, and its file is closed."""
    store, session = opened(stack, tmp_path / "store"), started(stack)
    samples = [sample(10 + number, 2) for number in range(4)]
    blobs = [stored(store, found) for found in samples]
    seeds = TorrentSeeds(session, count_max=2)
    seeds.keep(
        seed_of(blob, found.torrent, used) for blob, found, used in zip(blobs, samples, (5, 3, 9, 1), strict=True)
    )
    assert seeds.digests == {blobs[0].digest, blobs[2].digest}
    seeds.keep(
        seed_of(blob, found.torrent, used) for blob, found, used in zip(blobs, samples, (5, 8, 9, 1), strict=True)
    )
    wait_until(lambda: seeds.digests == {blobs[1].digest, blobs[2].digest}, "the change of seeds")
    seeds.keep([])
    wait_until(lambda: not seeds.digests, "the end of all seeds")


def test_a_released_blob_can_be_evicted(stack: ExitStack, tmp_path: Path) -> None:
    """While it is seeded its file may be open; once released it is not, so that removal gives the
    space back."""
    found = sample(3, COUNT)
    store, session = opened(stack, tmp_path / "store"), started(stack)
    blob = stored(store, found)
    path = blob.path
    seeds = TorrentSeeds(session)
    seeds.keep([seed_of(blob, found.torrent)])
    copy, events = opened(stack, tmp_path / "copy").begin(found.digest, found.pieces), Events()
    TorrentTransfer(started(stack), copy, found.torrent, Swarm(peers=(("127.0.0.1", session.port),)), events).start()
    assert events.closed().reason == "done"
    assert open_files(path) == 1, "libtorrent keeps it open for the next"
    assert seeds.release(found.digest)
    assert open_files(path) == 0
    store.remove(found.digest)
    assert not path.exists()
    assert seeds.release(found.digest), "what is not seeded is free"


def test_a_seed_whose_file_is_gone_is_dropped(stack: ExitStack, tmp_path: Path) -> None:
    """Nothing is created in its place, and the others go on."""
    gone, found = sample(4, COUNT), sample(5, COUNT)
    store, session = opened(stack, tmp_path / "store"), started(stack)
    lost, blob = stored(store, gone), stored(store, found)
    seeds = TorrentSeeds(session)
    lost.path.unlink()
    seeds.keep([seed_of(lost, gone.torrent), seed_of(blob, found.torrent)])
    copies = opened(stack, tmp_path / "copies")
    swarm, leech = Swarm(peers=(("127.0.0.1", session.port),)), started(stack)
    first = Events()
    transfer = TorrentTransfer(leech, copies.begin(gone.digest, gone.pieces), gone.torrent, swarm, first)
    transfer.start()
    wait_until(lambda: seeds.digests == {blob.digest}, "the seed to be dropped")
    events = Events()
    TorrentTransfer(leech, copies.begin(found.digest, found.pieces), found.torrent, swarm, events).start()
    assert events.closed().reason == "done"
    assert stopped(transfer)
    assert first.pieces == []
    assert not lost.path.exists()


@dataclass
class Stay:
    """A blob fetched from `source` by a transfer that stays in `session`."""

    found: Sample
    source: TorrentSession
    session: TorrentSession
    blob: Blob
    transfer: TorrentTransfer
    events: Events


def stayed(stack: ExitStack, root: Path, found: Sample) -> Stay:
    """Fetch a blob, all of it."""
    source, session = started(stack), started(stack)
    TorrentSeeds(source).keep([seed_of(stored(opened(stack, root / "0"), found), found.torrent)])
    blob, events = opened(stack, root / "1").begin(found.digest, found.pieces), Events()
    swarm = Swarm(peers=(("127.0.0.1", source.port),))
    transfer = TorrentTransfer(session, blob, found.torrent, swarm, events, stay=True)
    transfer.start()
    assert events.closed().reason == "done"
    blob.finish()
    return Stay(found, source, session, blob, transfer, events)


def test_a_transfer_that_stays_is_taken_over_and_gives_without_a_pause(stack: ExitStack, tmp_path: Path) -> None:
    """Though the store gives the file another name meanwhile; when it is released nothing of it is
    open any more."""
    stay = stayed(stack, tmp_path, sample(6, COUNT))
    found, middle, copy = stay.found, stay.session, stay.blob
    seeds = TorrentSeeds(middle)
    seeds.take_over(seed_of(copy, found.torrent), stay.transfer)
    stay.source.close()
    other, heard = opened(stack, tmp_path / "2").begin(found.digest, found.pieces), Events()
    TorrentTransfer(started(stack), other, found.torrent, Swarm(peers=(("127.0.0.1", middle.port),)), heard).start()
    assert heard.closed().reason == "done"
    seeds.keep([seed_of(copy, found.torrent)])
    assert seeds.digests == {found.digest}
    assert seeds.release(found.digest)
    assert not seeds.digests
    # The store itself has it open for a moment, a second after it became complete.
    wait_until(lambda: open_files(copy.path) == 0, "the file to be closed")
    assert stay.events.closed().reason == "done", "it is told once"


def test_a_transfer_that_nobody_takes_over_goes_in_the_end(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever comes too late seeds it like any other blob, or not at all when it was
    released."""
    monkeypatch.setattr("p2pdist.transfer.torrent.transfer.STAY_S", 0.2)
    stay = stayed(stack, tmp_path, sample(7, COUNT))
    found, middle, copy = stay.found, stay.session, stay.blob
    wait_until(lambda: open_files(copy.path) == 0, "the file to be closed")
    seeds = TorrentSeeds(middle)
    seeds.take_over(seed_of(copy, found.torrent), stay.transfer)
    wait_until(lambda: not seeds.digests, "the seed to hear that there is nothing to take over")
    seeds.keep([seed_of(copy, found.torrent)])
    assert seeds.digests == {found.digest}


@pytest.mark.parametrize("ended", [False, True])
def test_a_session_ends_though_a_transfer_stays(stack: ExitStack, tmp_path: Path, ended: bool) -> None:
    """Also when it is taken over while the session ends, or afterwards: then it is not seeded, and
    there is nothing to wait for."""
    stay = stayed(stack, tmp_path, sample(8, COUNT))
    found, middle, copy = stay.found, stay.session, stay.blob
    seeds, gate = TorrentSeeds(middle), threading.Event()
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(middle.close()))
    if not ended:
        middle.call(lambda: gate.wait(60) and None)
        wait_until(lambda: not middle._calls, "the session to be held up")
    closing.start()
    if ended:
        closing.join()
    else:
        wait_until(lambda: bool(middle._calls), "the session to be told to end")
    seeds.take_over(seed_of(copy, found.torrent), stay.transfer)
    gate.set()
    closing.join()
    assert closed == [True]
    wait_until(lambda: open_files(copy.path) == 0, "the file to be closed")
    assert not seeds.digests and seeds.release(found.digest)
