"""Looking names up within a time limit, with a name server that answers nothing, in namespaces of
their own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from p2pdist.model.address import Vicinity, by_name
from p2pdist.model.plan import Source
from p2pdist.transfer.names import NAMES, Names, Resolver, Unresolved
from p2pdist.transfer.stream.connections import Unreachable, connect

SILENT = """
import socket, threading
hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
hole.bind(("127.0.0.1", 53))
from p2pdist.transfer import names as module
module.LOOKUP_S = 0.3
names = module.Names()

def why(name):
    try:
        return str(names.find(name))
    except module.Unresolved as error:
        return str(error)
"""


def with_a_silent_name_server(script: str, tmp_path: Path) -> str:
    """What a script prints where one name server takes questions and answers none, and /etc/hosts
    knows `here`."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch a.example b.example\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.9.0.9 here\n")
    mounts = "mount --bind resolv.conf /etc/resolv.conf; mount --bind hosts /etc/hosts; ip link set lo up"
    words = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-ec", f'{mounts}; exec "$@"', "sh"]
    words += [sys.executable, "-c", SILENT + textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.root
def test_silent_name_servers_are_given_up_and_ever_sooner(tmp_path: Path) -> None:
    """After two names it is the servers, and others are waited for less; /etc/hosts is read all the
    same; names that failed are not asked for again at once; a process ends although look-ups go
    on."""
    said = with_a_silent_name_server(
        """
        print(why("one"), names.silent)
        print(why("two"), names.silent)
        print(why("three"))
        print(why("here"))
        print(why("one"), len(names._running))
        """,
        tmp_path,
    )
    assert said.splitlines() == [
        "the name servers did not answer for one within 0.3 s False",
        "the name servers did not answer for two within 0.3 s True",
        "the name servers did not answer for three within 0.2 s",
        "((<AddressFamily.AF_INET: 2>, '10.9.0.9'),)",
        "the name servers did not answer for one within 0.3 s 3",
    ]


@pytest.mark.root
def test_look_ups_that_hang_are_bounded_and_take_no_thread_of_others(tmp_path: Path) -> None:
    said = with_a_silent_name_server(
        """
        import asyncio
        module.SILENT_WAIT_S = module.LOOKUP_S = 0.01
        reasons = [why(f"n{number}") for number in range(module.LOOKUPS_MAX + 8)]
        print(sum("wait for the name servers" in reason for reason in reasons), len(names._running))

        async def main():
            looked_up = await asyncio.gather(*(names.find_soon(f"m{n}") for n in range(50)), return_exceptions=True)
            print(all(isinstance(each, module.Unresolved) for each in looked_up))
            print(await asyncio.to_thread(lambda: "a thread is free"))

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert said.splitlines() == ["8 32", "True", "a thread is free"]


@pytest.mark.root
def test_what_was_found_before_is_given_while_the_name_servers_are_silent(tmp_path: Path) -> None:
    said = with_a_silent_name_server(
        """
        module.FRESH_S = 0.0
        print(why("here"))
        open("hosts", "w").write("127.0.0.1 localhost\\n")
        print(why("here"))
        print(why("here"))
        """,
        tmp_path,
    )
    assert said.splitlines() == ["((<AddressFamily.AF_INET: 2>, '10.9.0.9'),)"] * 3


def test_numbers_are_not_looked_up() -> None:
    names = Names()
    assert [address for _, address in names.find("127.0.0.1")] == ["127.0.0.1"]
    assert [address for _, address in names.find("::1")] == ["::1"]
    assert not names._found and not names._running
    assert [by_name(each) for each in ("10.0.0.7:1", "[fd00::7]:1", "h1:1", "")] == [False, False, True, False]


async def test_a_name_that_cannot_be_is_told_and_not_asked_for_again_at_once() -> None:
    """A label has up to 63 letters, so nobody is asked for this one."""
    name, resolver = "x" * 64, Resolver(Names())
    for _ in range(2):
        with pytest.raises(Unresolved, match=name):
            await resolver.resolve(name, 80)
    assert name in resolver._names._failed
    with pytest.raises(Unreachable, match=f"h1 at {name}:7071 cannot be reached"):
        await asyncio.to_thread(
            connect, Source("h1", f"{name}:7071"), lambda connection: None, timeout_s=1.0, dead_after_s=1.0
        )
    assert NAMES._failed[name]


def test_a_name_is_looked_up_again_once_there_may_be_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads once took the name for being looked up for ever."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names = Names()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unresolved, match="thread"):
            names.find("localhost")
    assert names.find("localhost")


async def test_a_name_that_stands_for_this_machine_leads_no_host_elsewhere_to_its_own_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner of a name says what it stands for at each look-up, whatever the tracker found."""
    rebound, elsewhere = "rebound.example", Vicinity("10.0.0.1", "10.0.0.1")
    real = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == rebound else host, *rest, **{**more, "flags": socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    inner = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    source = Source("h2", f"{rebound}:{inner.sockets[0].getsockname()[1]}")
    used: list[socket.socket] = []

    def open_from(vicinity: Vicinity | None) -> socket.socket:
        return connect(source, used.append, timeout_s=5.0, dead_after_s=5.0, vicinity=vicinity)

    async with inner:
        with pytest.raises(Unreachable, match=f"{rebound} stands for 127.0.0.1, which is another machine"):
            await asyncio.to_thread(open_from, elsewhere)
        assert not used, "nothing was connected to"
        with pytest.raises(Unresolved, match="another machine"):
            await Resolver(Names(), lambda: elsewhere).resolve(rebound, 80)
        (await asyncio.to_thread(open_from, Vicinity("127.0.0.1"))).close()
