"""Packages that share content, and hosts that do things with them in a random order, beside a model
of what must be there."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from site_rig import Agent

from p2pdist.agent.api.client import LocalClient
from p2pdist.cli.services import opened_layout
from p2pdist.model.errors import Conflict, DiskFull, NotFound, P2PDistError, Unavailable
from p2pdist.model.manifest import TREE_TYPE, parse_reference
from p2pdist.model.messages import MountRequest, PullRequest, VerifyRequest
from p2pdist.model.tree import content_hash
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer

KIB, MIB = 1 << 10, 1 << 20
COUNTED = ("complete", "partial", "small", "objects", "expected", "images", "variants")
LOOKS = 5
FLIGHTS_MAX = 3
PINS_MAX = 2
MOUNTS_MAX = 3
GIVEN_UP_S_MAX = 30.0
KILL_AFTER_S_MAX = 0.05
"""After the beginning of what is under way when an agent is killed."""

ACTIONS = {
    "pull": 20,
    "pull_and_wait": 14,
    "mount": 14,
    "umount": 12,
    "pin": 8,
    "unpin": 7,
    "remove": 7,
    "collect": 6,
    "read": 10,
    "verify": 0.5,
    "crash": 0.7,
    "crash_amid": 0.8,
}
"""What is done next, with weights."""


@dataclass(frozen=True)
class Kept:
    """A package at the origin: files by path with SHA-256 of what they show; what must lie in a
    store that shows it: paths below the store and sizes; the digests of its blobs; and the bytes
    that it may take there at most."""

    reference: str
    digest: str
    files: dict[str, str]
    stored: dict[str, int]
    blobs: frozenset[str]
    bytes_max: int


class Publisher:
    """Packs directories into a layout that is the origin."""

    def __init__(self, layout: Path, sources: Path) -> None:
        self._layout, self._sources = layout, sources
        self._made: dict[str, Kept] = {}

    def pack(self, reference: str, form: str, files: dict[str, bytes], base: str = "") -> Kept:
        source = self._sources / reference.replace(":", "-")
        for name, data in files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            os.utime(path, (1, 1))
        packed = asyncio.run(self._pack(reference, form, source, base))
        below = self._made.get(base)
        stored = dict(below.stored) if below else {}
        contents = 0
        for layer in packed.layers:
            if layer.media_type != TREE_TYPE:
                stored[f"blobs/sha256/{layer.digest.removeprefix('sha256:')}"] = layer.size
        if form == "tree":
            for data in filter(None, files.values()):
                name = content_hash(data).hex()
                stored[f"objects/{name[:2]}/{name[2:]}"] = len(data)
                contents += len(data)
        shown = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        blobs = sum(blob.size for blob in (*packed.layers, *packed.parts))
        # Packs may be here whole and, besides, as selections of their pieces.
        most = 2 * blobs + contents + 256 * KIB + 1024 * len(files) + (below.bytes_max if below else 0)
        digests = frozenset(str(blob.digest) for blob in (*packed.layers, *packed.parts))
        files_shown = {**(below.files if below else {}), **shown}
        made = Kept(reference, packed.digest, files_shown, stored, digests, most)
        self._made[reference] = made
        return made

    async def _pack(self, reference: str, form: Any, source: Path, base: str) -> Any:
        async with opened_layout(self._layout) as layout:
            making = PackOptions(base=parse_reference(base) if base else None, mtime=1, level=1)
            return (await pack_layers([plain_layer(source, form)], parse_reference(reference), layout, making))[0]


def publish(layout: Path, sources: Path) -> list[Kept]:
    """A dozen packages: versions of trees, images on a common base, a tree on an image."""
    drawn = random.Random(1)

    def noise(count: int, size: int, prefix: str) -> dict[str, bytes]:
        return {f"{prefix}/{number % 5}/{number}": drawn.randbytes(size + number) for number in range(count)}

    publisher = Publisher(layout, sources)
    shared, large = noise(30, 9 * KIB, "lib"), drawn.randbytes(MIB + 700 * KIB)
    base = noise(12, 20 * KIB, "base")
    made = [publisher.pack("tree:v1", "tree", {**shared, "weights": large})]
    changed = {**shared, **noise(6, 15 * KIB, "lib")}
    made.append(publisher.pack("tree:v2", "tree", {**changed, "weights": large, "empty": b""}))
    large = large[: 400 * KIB] + drawn.randbytes(60 * KIB) + large[400 * KIB :]
    made.append(publisher.pack("tree:v3", "tree", {**changed, "weights": large}))
    made.append(publisher.pack("tree:v4", "tree", {**noise(4, 50 * KIB, "lib"), "weights": large}))
    made.append(publisher.pack("other:v1", "tree", {**noise(40, 4 * KIB, "own"), **dict(list(shared.items())[:10])}))
    made.append(publisher.pack("other:v2", "tree", {**noise(40, 4 * KIB, "own"), "weights": large}))
    made.append(publisher.pack("base:v1", "squashfs", base))
    made += [
        publisher.pack(f"app:v{number}", "squashfs", noise(10, 40 * KIB, f"app{number}"), "base:v1")
        for number in (1, 2, 3)
    ]
    made.append(
        publisher.pack("mixed:v1", "tree", {**noise(5, 30 * KIB, "mix"), **dict(list(shared.items())[:20])}, "base:v1")
    )
    made.append(publisher.pack("image:v1", "squashfs", noise(3, 300 * KIB, "image")))
    return made


@dataclass
class Shown:
    """A package at a directory, perhaps with a shown file that is kept open, so that it cannot be
    unmounted."""

    package: Kept
    opened: int | None = None

    def close(self) -> None:
        if self.opened is not None:
            os.close(self.opened)
            self.opened = None


class Stopped(Exception):
    """Another host has failed."""


@dataclass
class Host:
    """One agent, what was asked of it, and what must therefore hold. Used by one thread."""

    agent: Agent
    packages: list[Kept]
    capacity: int
    seed: int
    stopped: threading.Event
    pins: dict[str, Kept] = field(default_factory=dict)
    mounts: dict[str, Shown] = field(default_factory=dict)
    flights: list[tuple[Kept, Future[Any]]] = field(default_factory=list)
    broken_off: list[Kept] = field(default_factory=list)
    """Pulls that a kill ended may have left partial blobs, which stay for a while."""
    under_way: list[Kept] = field(default_factory=list)
    """Pulls of which none had been seen to end when `land` looked last."""
    lately: list[Kept] = field(default_factory=list)
    """These, and the ones of the time before."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    counted: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)
        self.client = LocalClient(self.agent.socket)
        self.threads = ThreadPoolExecutor(FLIGHTS_MAX + 1)
        self.places = self.agent.site.directory / f"shown-{self.agent.name}"
        self.places.mkdir()
        self.number = 0

    # -- doing

    def run(self, count: int) -> None:
        """Do so many things, then give everything up and see that every package can be had."""
        try:
            for _ in range(count):
                if self.stopped.is_set():
                    raise Stopped
                (name,) = self.drawn.choices(list(ACTIONS), list(ACTIONS.values()))
                began = time.monotonic()
                self.log.append(name)
                getattr(self, name)()
                self.counted[name] += 1
                self.counted[f"{name} ms"] += int(1000 * (time.monotonic() - began))
                self.land(wait=False)
                self.check()
            self.finish()
        except Stopped:
            raise
        except BaseException as error:
            self.stopped.set()
            error.add_note(f"{self.agent.name}, seed {self.seed}, the last of it: {'; '.join(self.log)}")
            error.add_note(f"its log: {self.agent.log.read_text(errors='replace')[-4000:]}")
            raise
        finally:
            for shown in self.mounts.values():
                shown.close()
            self.threads.shutdown(wait=False, cancel_futures=True)

    def note(self, text: str) -> None:
        self.log[-1] += f" {text}"

    def draw(self) -> Kept:
        package = self.drawn.choice(self.packages)
        self.note(package.reference)
        return package

    def attempt(self, package: Kept | None, call: Callable[[], Any]) -> Any:
        """What a call returns; None when there was no room and there need not be."""
        try:
            return call()
        except DiskFull as error:
            self.refused(package, error)
            return None

    def refused(self, package: Kept | None, error: DiskFull) -> None:
        staying = {each.reference: each for each in (*self.kept(), *self.broken_off)}
        staying |= {each.reference: each for each in (*self.lately, *(each for each, _ in self.flights))}
        if package is not None:
            staying[package.reference] = package
        most = sum(each.bytes_max for each in staying.values())
        self.note(f"no room: {error.what}")
        self.counted["no room"] += 1
        assert most > self.capacity, f"there must be room for {sorted(staying)}: {error}"

    def kept(self) -> list[Kept]:
        return [*self.pins.values(), *(shown.package for shown in self.mounts.values())]

    def pull(self) -> None:
        if len(self.flights) < FLIGHTS_MAX:
            package = self.draw()
            call = self.client.pull
            self.flights.append((package, self.threads.submit(call, PullRequest(package=package.reference))))

    def pull_and_wait(self) -> None:
        package = self.draw()
        if self.attempt(package, lambda: self.client.pull(PullRequest(package=package.reference))):
            self.whole(package)

    def whole(self, package: Kept) -> None:
        """A package was pulled whole: nothing partial is left of it."""
        self.broken_off = [each for each in self.broken_off if each is not package]

    def land(self, *, wait: bool, killed: bool = False) -> None:
        """See what came of pulls that have ended. One that found no room may have done so while
        others were under way that have ended, too."""
        before, self.under_way = self.under_way, [package for package, _ in self.flights]
        self.lately = [*before, *self.under_way]
        for package, flight in self.flights[:]:
            if flight.done() or wait:
                try:
                    flight.result(60)
                    self.whole(package)
                except DiskFull as error:
                    self.refused(package, error)
                except (Unavailable, NotFound):
                    if not killed:
                        raise
                self.flights.remove((package, flight))

    def mount(self) -> None:
        if len(self.mounts) < MOUNTS_MAX:
            package, place = self.draw(), self.place()
            request = MountRequest(package.reference, place, writable=self.drawn.random() < 0.2)
            if (status := self.attempt(package, lambda: self.client.mount(request))) is not None:
                assert status.path == place
                self.whole(package)
                self.mounts[place] = self.opened(package, place)

    def place(self) -> str:
        self.number += 1
        return str(self.places / str(self.number))

    def opened(self, package: Kept, place: str) -> Shown:
        name = self.drawn.choice(sorted(package.files))
        return Shown(package, os.open(f"{place}/{name}", os.O_RDONLY) if self.drawn.random() < 0.5 else None)

    def umount(self) -> None:
        if self.mounts:
            place = self.drawn.choice(sorted(self.mounts))
            self.note(place)
            shown = self.mounts[place]
            if shown.opened is not None:
                try:
                    self.client.unmount(place)
                except Conflict:
                    shown.close()
                else:
                    raise AssertionError(f"{place} is in use and was unmounted")
            self.client.unmount(place)
            del self.mounts[place]
            assert not os.path.lexists(place)

    def pin(self) -> None:
        if len(self.pins) < PINS_MAX:
            package = self.draw()
            if self.attempt(package, lambda: self.client.pin(package.reference)):
                self.whole(package)
                self.pins[package.reference] = package

    def unpin(self) -> None:
        if self.pins:
            name = self.drawn.choice(sorted(self.pins))
            self.note(name)
            self.client.unpin(name)
            del self.pins[name]

    def remove(self) -> None:
        package = self.draw()
        deadline = time.monotonic() + GIVEN_UP_S_MAX
        while True:
            try:
                self.client.remove(package.reference)
            except NotFound:
                assert package not in self.kept()
            except Conflict as error:
                self.note(str(error))
                # A pull that is under way has a part of what others have, too; what one that failed
                # had begun goes on for a while.
                if not any(package.blobs & each.blobs for each in (*self.kept(), *(each for each, _ in self.flights))):
                    assert time.monotonic() < deadline, error
                    time.sleep(0.05)
                    continue
            else:
                self.note("done")
                self.whole(package)
                assert package not in self.kept(), f"{package.reference} was removed, and is in use"
            return

    def collect(self) -> None:
        self.client.collect()

    def read(self) -> None:
        """All that is shown, compared with what was packed."""
        for place, shown in self.mounts.items():
            self.compare(place, shown.package)

    def compare(self, place: str, package: Kept) -> None:
        found = {
            str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in Path(place).rglob("*")
            if path.is_file()
        }
        assert found == package.files, f"{place} does not show {package.reference}"

    def verify(self) -> None:
        found = self.client.verify(VerifyRequest(), lambda _: None)
        assert not found.wrong and not found.failed, found

    # -- being killed

    def crash(self) -> None:
        self.agent.kill()
        self.restart()

    def crash_amid(self) -> None:
        """Kill the agent amid a mount, a pin, a removal or a collection, of which either all or
        nothing has happened afterwards."""
        package, place = self.draw(), self.place()
        calls: list[Callable[[], Any]] = [
            lambda: self.client.mount(MountRequest(package.reference, place)),
            lambda: self.client.pin(package.reference),
            lambda: self.client.remove(package.reference),
            self.client.collect,
        ]
        number = self.drawn.randrange(len(calls))
        self.note(("mount", "pin", "remove", "collect")[number])
        flight = self.threads.submit(calls[number])
        time.sleep(self.drawn.random() * KILL_AFTER_S_MAX)
        self.agent.kill()
        outcome = flight.exception(30)
        assert outcome is None or isinstance(outcome, P2PDistError), outcome
        self.broken_off.append(package)
        if number == 1:
            known = self.pins.get(package.reference)
            self.restart()
            owners = {pin.owner for pin in self.client.pins()}
            if known is None and f"pin:{package.reference}" in owners:
                # It was not promised: some of its layers may be missing, and pulling it brings
                # them.
                self.attempt(package, lambda: self.client.pull(PullRequest(package=package.reference)))
                self.client.unpin(package.reference)
            return
        self.restart()
        if place in {mount.path for mount in self.client.mounts()}:
            self.compare(place, package)
            self.mounts[place] = Shown(package)
        else:
            assert number != 0 or outcome is not None
            assert not os.path.lexists(place)

    def restart(self) -> None:
        """Start the agent again. What was shown is shown as before, in use or not; pins stay."""
        self.broken_off += [package for package, _ in self.flights]
        self.agent.start()
        self.land(wait=True, killed=True)
        self.read()

    # -- what must hold

    def check(self) -> None:
        """Nothing that is pinned or shown is lost, whatever else is going on, and the quota
        holds."""
        for package in self.kept():
            for name, size in package.stored.items():
                try:
                    found = os.stat(self.agent.store / name).st_size
                except FileNotFoundError:
                    found = -1
                assert found == size, f"{name} of {package.reference} has {found} bytes, not {size}"
        self.check_quota()
        assert {mount.path for mount in self.client.mounts()} == set(self.mounts)
        assert {pin.owner for pin in self.client.pins()} == {f"pin:{name}" for name in self.pins}
        complete = {str(each["digest"]) for each in self.client.packages() if each["complete"]}
        assert {package.digest for package in self.kept()} <= complete

    def check_quota(self) -> None:
        """The figures of a status are not all of one moment: what gives way meanwhile may be
        counted beside what takes its place."""
        for _ in range(LOOKS):
            usage = self.client.status()["store"]["usage"]
            total = sum(usage[f"bytes_{kind}"] for kind in COUNTED)
            if total <= self.capacity:
                return
            self.counted["looked again"] += 1
            time.sleep(0.02)
        raise AssertionError(f"{total} bytes of {self.capacity}: {usage}")

    def finish(self) -> None:
        """Give everything up; then each package can be had, one after the other, and what is stored
        is right."""
        self.log.append("finish")
        self.land(wait=True)
        self.read()
        for place in list(self.mounts):
            self.mounts[place].close()
            self.client.unmount(place)
            del self.mounts[place]
        for name in list(self.pins):
            self.client.unpin(name)
            del self.pins[name]
        for package in self.packages:
            self.log.append(f"at last {package.reference}")
            place = self.place()
            self.attempt(
                package, lambda package=package, place=place: self.client.mount(MountRequest(package.reference, place))
            )  # type: ignore[misc]
            if os.path.lexists(place):
                self.compare(place, package)
                self.client.unmount(place)
        self.verify()
        self.check()
