"""Processes of the collection tests: pushes and collections that run beside each other, and such as
are killed at a certain point."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Conflict
from p2pdist.model.manifest import parse_reference
from p2pdist.origin import layout as layout_module
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin, LocalLayout
from p2pdist.package.pack import pack
from p2pdist.package.repository import gc as collect_module
from p2pdist.package.repository.gc import sweep
from p2pdist.package.repository.push import push


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def push_all(layout: LocalLayout, origin: LayoutOrigin, tags: list[str]) -> None:
    """Push one tag after the other, each time removing the one before, so that what is pushed is
    often there and unnamed."""
    for number, tag in enumerate(tags):
        await push(parse_reference(tag), layout, origin)
        if number + 1 < len(tags):
            await origin.untag(parse_reference(tag))


async def collect_until(place: LayoutOrigin, age_s: float, stop: Path) -> None:
    """Collect again and again until the file `stop` is there; its content says how many blobs went
    in all."""
    layout_module.PACKING_WAIT_S = 0.2
    collect_module.BATCH_BLOBS = 4
    removed = 0
    while not stop.exists():
        try:
            removed += (await sweep(place, older_than_s=age_s)).blobs_removed
        except Conflict:
            continue  # somebody packs all the time
    print(removed, file=sys.stderr)


async def pack_all(layout: LocalLayout, source: Path, tags: list[str]) -> None:
    """Pack two states of a directory in turn, each time removing the tag before."""
    for number, tag in enumerate(tags):
        (source / "file").write_bytes(bytes([number % 2]) * 1000)
        await pack(source, parse_reference(tag), layout, format="tree")
        if number + 1 < len(tags):
            await layout.untag(parse_reference(tag))


async def push_and_die(layout: LocalLayout, origin: LayoutOrigin, tag: str, after: int) -> None:
    def watch(_what: str, done: int, _total: int) -> None:
        if done >= after:
            die()

    await push(parse_reference(tag), layout, origin, on_progress=watch)


class Dying(LocalLayout):
    """A layout whose process dies in the middle of a deletion."""

    async def remove(self, digests: Sequence[Digest]) -> None:
        await super().remove(digests[: len(digests) // 2])
        die()


async def main(verb: str, words: list[str]) -> None:
    match verb, words:
        case "push", [layout, url, *tags]:
            origin = open_origin(url)
            assert isinstance(origin, LayoutOrigin)
            await push_all(LocalLayout(Path(layout)), origin, tags)
        case "collect", [url, age, stop]:
            origin = open_origin(url)
            assert isinstance(origin, LayoutOrigin)
            await collect_until(origin, float(age), Path(stop))
        case "pack", [layout, source, *tags]:
            await pack_all(LocalLayout(Path(layout)), Path(source), tags)
        case "push-and-die", [layout, origin_directory, tag, after]:
            await push_and_die(LocalLayout(Path(layout)), LocalLayout(Path(origin_directory)), tag, int(after))
        case "collect-and-die", [directory]:
            await sweep(Dying(Path(directory)), older_than_s=-1)
        case _:
            raise SystemExit(2)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
