"""The semaphore of threads that receive over TLS (openssl/semaphore.py): first come, first served;
and who waits for its peer, has ended or failed keeps nobody from receiving."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
from authority import server_by_ssl
from test_openssl_client import Behave, Peer, opened, peer, speaking

from p2pdist.transfer.openssl import semaphore
from p2pdist.transfer.openssl.client import TlsSocket
from p2pdist.transfer.openssl.semaphore import HOLD_BYTES, RECEIVING, FairSemaphore
from p2pdist.transfer.tls import Tls, TlsError

__all__ = ["peer"]
PIECE = 200_000


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("at_once", [1, 2])
def test_permits_are_had_in_the_order_in_which_threads_came(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphore, "PATIENCE_S", 60)
    one, order = FairSemaphore(at_once), list[int]()
    held = [one.acquire() for _ in range(at_once)]
    threads = []
    for number in range(5):

        def wait(number: int = number) -> None:
            permit = one.acquire()
            order.append(number)
            one.release(permit)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        until(lambda number=number: one.waiting == number + 1)  # type: ignore[misc]
    assert not order
    one.release(held.pop())
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4] and not one.waiting
    for permit in held:
        one.release(permit)
    assert one.free == at_once


def test_who_takes_too_long_loses_the_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and what it releases later is not there twice."""
    monkeypatch.setattr(semaphore, "PATIENCE_S", 0.05)
    one = FairSemaphore(2)
    held = [one.acquire() for _ in range(6)]
    assert one.free == 0
    for permit in (*held, *held):
        one.release(permit)
    assert one.free == 2


def serving(peer: Callable[[Behave], Peer], tls: Tls, then: Callable[[ssl.SSLSocket], None]) -> TlsSocket:
    return opened(peer(speaking(server_by_ssl(tls), then)), tls, timeout_s=None)


def all_but(count: int, until: threading.Event | None = None) -> Callable[[ssl.SSLSocket], None]:
    """A service that sends PIECE bytes, the last `count` of them later."""

    def then(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.sendall(bytes(PIECE - count))
        if until is not None:
            until.wait(30)
        secured.sendall(bytes(count))

    return then


def whole(connection: TlsSocket) -> bool:
    connection.sendall(b"x")
    return connection.recv_all_into(memoryview(bytearray(PIECE)), permit=True) == PIECE


def free() -> bool:
    return RECEIVING.free == AT_ONCE


AT_ONCE = RECEIVING.free


def test_who_waits_for_its_peer_lets_others_receive(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    done, go = list[bool](), threading.Event()
    waiting = [serving(peer, tls, all_but(1, go)) for _ in range(AT_ONCE + 1)]

    def receive(one: TlsSocket) -> None:
        done.append(whole(one))
        one.rest()

    threads = [threading.Thread(target=receive, args=(one,)) for one in waiting]
    for thread in threads:
        thread.start()
    until(free)
    with serving(peer, tls, all_but(0)) as other:
        assert whole(other) and not done
        assert not free(), "it keeps its permit while it stores what came"
        other.rest()
    assert free()
    go.set()
    for thread in threads:
        thread.join(20)
    assert done == [True] * len(waiting)
    for one in waiting:
        one.rest()  # it has none
        one.close()
    assert free()


def test_who_does_something_else_for_long_keeps_nobody_from_receiving(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """As a thread that waits for the disk."""
    busy = [serving(peer, tls, all_but(0)) for _ in range(AT_ONCE)]
    try:
        assert all(map(whole, busy)) and not RECEIVING.free
        with serving(peer, tls, all_but(0)) as other:
            assert whole(other)
    finally:
        for one in busy:
            one.close()
    assert free()


def test_a_connection_that_ends_or_fails_gives_its_permit_back(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    def cut(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.sendall(bytes(5))

    def broken(secured: ssl.SSLSocket) -> None:
        cut(secured)
        raw = socket.socket(fileno=secured.detach())
        raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        raw.close()

    with serving(peer, tls, cut) as one:
        assert not whole(one)
    assert free()
    with serving(peer, tls, broken) as one, pytest.raises(TlsError):
        whole(one)
    assert free()


def test_a_permit_is_released_after_many_bytes_where_others_wait(peer: Callable[[Behave], Peer], tls: Tls) -> None:
    """Two that always have something to receive, and have one permit between them."""
    held = [RECEIVING.acquire() for _ in range(AT_ONCE - 1)]
    total = 40 * HOLD_BYTES

    def much(secured: ssl.SSLSocket) -> None:
        secured.recv(1)
        secured.sendall(bytes(total))

    order: list[int] = []

    def receive(number: int) -> None:
        with serving(peer, tls, much) as one:
            one.sendall(b"x")
            place = memoryview(bytearray(HOLD_BYTES // 4))
            for _ in range(total // len(place)):
                assert one.recv_all_into(place, permit=True) == len(place)
                order.append(number)

    try:
        threads = [threading.Thread(target=receive, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        for permit in held:
            RECEIVING.release(permit)
    assert order.count(0) == order.count(1) == total // (HOLD_BYTES // 4) and free()
