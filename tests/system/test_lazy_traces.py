"""Whole processes: a start is prefetched by what an earlier start on another host read, also of
the next version; and people see, export and give traces."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lazy_marks import needs_events
from site_rig import P2PDIST, Agent, Site

from p2pdist.model.device import BLOCK_BYTES, DeviceLayout
from p2pdist.model.trace import TraceBuilder, decode_trace, encode_trace
from p2pdist.model.tree import content_hash, walking_order
from p2pdist.mount import kernel
from p2pdist.mount.lazy.view import cells_of

MIB = 1 << 20
SLOW_BYTES_S = 3 * MIB
MODULES, FILE_BYTES = 60, 150_000
FILES = sorted(f"lib/p{number % 7}/m{number}.py" for number in range(MODULES))
READ = random.Random(11).sample(FILES[::2], 25)
"""What the program reads, in this order: no neighbours, which have bytes in one cell."""

LIMIT_S = 600.0
PATIENT = {"lazy-wait": str(LIMIT_S)}
"""Options of agents whose readers wait longer than a busy machine takes: no test is of the
limit."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def source(site: Site) -> Path:
    """A tree with many files, some of which its program reads; its package is team/app:v1."""
    top, drawn = site.directory / "source", random.Random(7)
    for name in FILES:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn.randbytes(FILE_BYTES))
    (top / "weights.bin").write_bytes(drawn.randbytes(32 * MIB))
    lines = ["#!/bin/sh", *(f'cat "$P2PDIST_ROOT/{name}"' for name in READ), "# " + "padding" * 1000]
    (top / "start.sh").write_text("\n".join(lines))
    (top / "start.sh").chmod(0o755)
    publish(site, top, "v1")
    return top


def publish(site: Site, top: Path, tag: str, *options: str) -> None:
    layout = ("--layout", str(site.directory / "layout"))
    entrypoint = '["${P2PDIST_ROOT}/start.sh"]'
    words = ("pack", str(top), "-t", f"team/app:{tag}", "--format", "tree", "--entrypoint", entrypoint, *options)
    code, _, errors = site.command(*words, *layout)
    assert code == 0, errors
    code, _, errors = site.command("push", f"team/app:{tag}", "--origin", f"file://{site.layout}", *layout)
    assert code == 0, errors


@pytest.fixture(autouse=True)
def nothing_stays(site: Site) -> Iterator[None]:
    yield
    for mounted in reversed(kernel.mounted()):
        if site.directory in mounted.point.parents:
            with suppress(OSError):
                kernel.unmount(mounted.point, lazily=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def asked(site: Site, *words: str) -> Any:
    code, told, errors = site.command("trace", *words, "--tracker", site.tracker_url)
    assert code == 0, errors
    return told


def start(agent: Agent, source: Path, tag: str = "v1") -> None:
    """Run the program lazily; it prints what it reads."""
    words = [*P2PDIST, "run", "--lazy", "--socket", str(agent.socket), f"team/app:{tag}"]
    ran = subprocess.run(words, capture_output=True)
    assert ran.returncode == 0 and b"lazy: fanotify" in ran.stderr, ran.stderr
    assert ran.stdout == b"".join((source / name).read_bytes() for name in READ)


def view(agent: Agent, tag: str = "v1") -> tuple[Path, Callable[[], dict[str, Any]]]:
    """The package, mounted lazily for no program, and what its status is."""
    path = agent.site.directory / f"view-{agent.name}"
    code, _, errors = agent.site.command("mount", "--lazy", f"team/app:{tag}", str(path), "--socket", str(agent.socket))
    assert code == 0 and "eager" not in errors, errors

    def status() -> dict[str, Any]:
        code, told, errors = agent.site.command("status", "--socket", str(agent.socket))
        assert code == 0, errors
        (mount,) = told["mounts"]
        return dict(mount["lazy"])

    return path, status


class Written:
    """Watches in which order the files that the program reads are written to a device. Asking where
    it has holes is no read."""

    def __init__(self, agent: Agent, source: Path) -> None:
        (self._device,) = (agent.store / "mounts/records").glob("*/device")
        files = [path for path in source.rglob("*") if path.is_file()]
        files.sort(key=lambda path: walking_order(os.fsencode(path.relative_to(source))))
        contents = {path: content_hash(path.read_bytes()) for path in files}
        # Chunk lists say only where large contents are cut.
        layout = DeviceLayout({content: path.stat().st_size for path, content in contents.items()}, {})
        firsts, cells = layout.first_blocks(), cells_of(self._device.parent)
        self._middles = {
            name: next(cells.places(firsts[contents[source / name]] * BLOCK_BYTES + FILE_BYTES // 2, 1))[0]
            for name in READ
        }
        self._seen: list[str] = []

    def files(self) -> list[str]:
        """Those that are written, in the order in which they were; those of one look are in the
        order of READ."""
        handle = os.open(self._device, os.O_RDONLY)
        try:
            for name, middle in self._middles.items():
                with suppress(OSError):  # a hole up to the end
                    if name not in self._seen and os.lseek(handle, middle, os.SEEK_DATA) == middle:
                        self._seen.append(name)
        finally:
            os.close(handle)
        assert self._seen == READ[: len(self._seen)], "they are written in another order"
        return self._seen


def umount(agent: Agent, path: Path) -> None:
    code, _, errors = agent.site.command("umount", str(path), "--socket", str(agent.socket))
    assert code == 0, errors


def paths(trace: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(span["path"] for span in trace["spans"]))


@needs_events
def test_the_second_host_is_filled_by_what_the_first_one_read(site: Site, source: Path) -> None:
    site.origin.rate_bytes_s = SLOW_BYTES_S
    first, second, third = site.agents(3, **PATIENT)
    start(first, source)
    until(lambda: asked(site, "ls")["traces"], "the tracker has no trace")
    (kept,) = asked(site, "ls", "team/app:v1")["traces"]
    assert (kept["package"], kept["entry"], kept["recordings"]) == ("team/app", "start.sh", 1)
    known = asked(site, "show", "team/app:v1")
    assert paths(known) == ["start.sh", *READ]
    exported = site.directory / "start.trace"
    asked(site, "export", "team/app:v1", "-o", str(exported))
    assert decode_trace(exported.read_bytes()).places
    assert first.stop() == 0  # else the next one has all of it from there at once
    # Views for no program have a trace of their own: with it, what is filled can be watched.
    asked(site, "import", "team/app:v1", str(exported))
    site.origin.rate_bytes_s = SLOW_BYTES_S / 8  # else the rest is there before it was looked at
    path, status = view(second)
    written = Written(second, source)
    until(lambda: written.files() == READ, "nothing is prefetched")
    until(lambda: status()["prefetched_bytes"] >= FILE_BYTES * len(READ), "not all is readable")
    before = status()
    assert before["unread_bytes"] == before["prefetched_bytes"] and not before["whole"]
    assert b"".join((path / name).read_bytes() for name in READ) == b"".join(
        (source / name).read_bytes() for name in READ
    )
    after = status()
    assert after["misses"] == before["misses"], "the program waits for nothing that the trace names"
    assert after["prefetch_hits"] >= len(READ) and after["unread_bytes"] < FILE_BYTES
    umount(second, path)
    assert second.stop() == 0
    site.origin.rate_bytes_s = SLOW_BYTES_S
    start(third, source)
    until(lambda: asked(site, "ls", "team/app:v1")["traces"][-1]["recordings"] == 2, "one recording")
    assert [
        name for name in paths(asked(site, "show", "team/app:v1", "--entry", "start.sh")) if name != "start.sh"
    ] == READ


@needs_events
def test_the_next_version_inherits(site: Site, source: Path) -> None:
    """By content where that is still here, by path where it is another one."""
    site.origin.rate_bytes_s = SLOW_BYTES_S
    first, second = site.agents(2, **PATIENT)
    start(first, source)
    until(lambda: asked(site, "ls")["traces"], "the tracker has no trace")
    exported = site.directory / "start.trace"
    asked(site, "export", "team/app:v1", "-o", str(exported))
    assert first.stop() == 0
    asked(site, "import", "team/app:v1", str(exported))
    changed, moved = READ[3], READ[5]
    (source / changed).write_bytes(os.urandom(FILE_BYTES))
    (source / moved).rename(source / "lib/moved.py")
    publish(site, source, "v2", "--order", str(exported))
    site.origin.rate_bytes_s = SLOW_BYTES_S / 8  # else the rest is there before it was looked at
    path, status = view(second, "v2")
    until(lambda: status()["prefetched_bytes"] >= FILE_BYTES * len(READ), "nothing is prefetched")
    before = status()
    for name in (*READ[:5], "lib/moved.py", *READ[6:]):
        assert (path / name).read_bytes() == (source / name).read_bytes()
    assert status()["misses"] == before["misses"]
    umount(second, path)


@needs_events
def test_a_tracker_without_traces_and_a_trace_that_lies_change_nothing(site: Site, source: Path) -> None:
    """A trace of contents that no package has, and one whose paths lead elsewhere."""
    builder = TraceBuilder()
    for number in range(500):
        builder.add(content_hash(b"%d" % number), number, number)
    wrong = builder.trace({content_hash(b"7"): b"lib/p1/m1.py", content_hash(b"8"): b"../../etc/passwd"}, 900)
    file = site.directory / "wrong.trace"
    file.write_bytes(encode_trace(wrong))
    asked(site, "import", "team/app:v1", str(file), "--entry", "start.sh")
    site.origin.rate_bytes_s = SLOW_BYTES_S
    (agent,) = site.agents(1, **PATIENT)
    start(agent, source)


def test_traces_are_shown_exported_and_given(site: Site, source: Path) -> None:
    builder = TraceBuilder()
    for at_ms, name in enumerate(READ):
        builder.add(content_hash((source / name).read_bytes()), 0, at_ms)
    given = builder.trace({content_hash((source / name).read_bytes()): name.encode() for name in READ}, 90)
    file, other = site.directory / "given.trace", site.directory / "other.trace"
    file.write_bytes(encode_trace(given))
    code, _, errors = site.command("trace", "show", "team/app:v1", "--tracker", site.tracker_url)
    assert code != 0 and "no trace" in errors
    asked(site, "import", "team/app:v9", str(file), "--entry", "train")
    assert paths(asked(site, "show", "team/app:v1")) == READ
    told = asked(site, "export", "team/app:v1", "--entry", "train", "-o", str(other))
    assert told["chunks"] == len(READ) and decode_trace(other.read_bytes()) == given
    asked(site, "import", "team/app:v1", str(file), "--entry", "serve")
    code, _, errors = site.command("trace", "show", "team/app:v1", "--tracker", site.tracker_url)
    assert code != 0 and "--entry" in errors
    (site.directory / "no.trace").write_bytes(b"no trace")
    for words in (("import", "team/app:v1", "no.trace"), ("import", "team/app:v1", "missing.trace")):
        path = str(site.directory / words[2])
        code, _, errors = site.command("trace", *words[:2], path, "--tracker", site.tracker_url)
        assert code != 0 and "trace" in errors
    plain = subprocess.run(
        [*P2PDIST, "trace", "ls", "--tracker", site.tracker_url], capture_output=True, text=True, check=True
    )
    assert "train" in plain.stdout and "serve" in plain.stdout
