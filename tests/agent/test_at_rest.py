"""Flips and cuts of every kind of file of a store, while no agent runs: what is shown, written to
an output and sent afterwards is right, or it fails; it is never other bytes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from test_alone import ended

from p2pdist.agent.agent import Agent, AgentSettings
from p2pdist.model.errors import P2PDistError
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import MountRequest, PullRequest
from p2pdist.model.pieces import PieceList
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.layers import PackOptions, pack_layers, plain_layer
from p2pdist.package.repository.push import push_blob
from p2pdist.store.store import BlobStore

pytestmark = [pytest.mark.long, pytest.mark.root]
TRIALS = 50
TREE, IMAGE = parse_reference("tree:v1"), parse_reference("image:v1")


def below(*parts: str) -> Callable[[Path], list[Path]]:
    def found(store: Path) -> list[Path]:
        return [path for path in sorted((store.joinpath(*parts)).rglob("*")) if path.is_file() and path.stat().st_size]

    return found


KINDS: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "blob": (below("blobs"), "erofs"),
    "object": (below("objects"), "erofs"),
    "copied object": (below("objects"), "copy"),
    "image": (below("images"), "erofs"),
    "index": (lambda store: [store / "index.sqlite"], "erofs"),
    "document": (lambda store: [store / "index.sqlite"], "erofs"),
    "partial": (lambda store: sorted((store / "partial").glob("*.data")), "erofs"),
    "bitmap": (lambda store: sorted((store / "partial").glob("*.have")), "erofs"),
    "record": (below("mounts", "records"), "erofs"),
    "variant": (below("variants"), "hardlink"),
}


COPIED = {"index", "partial", "bitmap", "record"}
"""A trial of these begins with a copy of the store, all files of which have new change times."""


def damage(path: Path, dice: random.Random) -> None:
    """Flip a bit, or cut the file."""
    size = path.stat().st_size
    path.chmod(0o644)
    if dice.random() < 0.3:
        os.truncate(path, dice.randrange(size))
        return
    with path.open("r+b") as file:
        at = dice.randrange(size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << dice.randrange(8)]))


def damage_row(index: Path, dice: random.Random) -> None:
    """Flip a bit of a document that is a row."""
    with sqlite3.connect(index) as database:
        digest, data = dice.choice(database.execute("SELECT digest, data FROM smalls ORDER BY digest").fetchall())
        changed = bytearray(data)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        database.execute("UPDATE smalls SET data=? WHERE digest=?", (bytes(changed), digest))
    database.close()


def contents(directory: Path) -> dict[str, bytes | None]:
    """Names and bytes of what is shown; None for what cannot be read."""
    found: dict[str, bytes | None] = {}
    for path in sorted(directory.rglob("*")):
        try:
            found[str(path.relative_to(directory))] = path.read_bytes() if path.is_file() else b""
        except OSError:
            found[str(path.relative_to(directory))] = None
    return found


async def made(tmp_path: Path) -> tuple[LocalLayout, dict[str, bytes | None], str, bytes]:
    """An origin with a package of each kind, and a single blob; and what they hold."""
    origin = LocalLayout(tmp_path / "origin")
    origin.scratch()
    source, dice = tmp_path / "source", random.Random(1)
    source.mkdir()
    for number in range(12):
        path = source / f"d{number % 3}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dice.randbytes(3000 * number + 1))
        # The same content with another time: a variant where it is linked.
        if number in (2, 4):
            shutil.copyfile(path, path.with_name(f"again{number}"))
            os.utime(path.with_name(f"again{number}"), (1e9 + number, 1e9 + number))
    await pack_layers([plain_layer(source, "tree", ())], TREE, origin, PackOptions())
    await pack_layers([plain_layer(source, "squashfs", ())], IMAGE, origin, PackOptions())
    single = dice.randbytes(20 * 65536)
    (tmp_path / "single").write_bytes(single)
    return origin, contents(source), (await push_blob(tmp_path / "single", origin)).digest, single


async def looked_at(agent: Agent, tmp_path: Path, how: str, source: dict[str, bytes | None]) -> list[str]:
    """What is shown of both packages that differs from `source`; a file that cannot be read does
    not count, since that is no wrong byte."""
    wrong = []
    for reference in (TREE, IMAGE):
        target = tmp_path / "shown"
        method = how if reference is TREE else ""
        view = await agent.package_mounts.mount(MountRequest(str(reference), str(target), how=method))
        try:
            shown = await asyncio.to_thread(contents, target)
            wrong += [f"{reference} {name}" for name in {*shown, *source} if shown.get(name, b"") != source.get(name)]
        finally:
            await agent.mounts.unmount(view.path, force=True)
        shutil.rmtree(target, ignore_errors=True)
    return wrong


def partial(store: Path, digest: str, data: bytes) -> None:
    """Leave half of the single blob as a killed agent does."""
    opened = BlobStore(store)
    path = store.parent / "single"
    with path.open("rb") as file:
        pieces = PieceList.of_stream(file, len(data))
    blob = opened.begin(digest, pieces)  # type: ignore[arg-type]
    for piece in range(0, blob.layout.count, 2):
        start = blob.layout.offset(piece)
        assert blob.write(piece, data[start : start + blob.layout.length(piece)])
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_no_wrong_byte_comes_of_what_changed_at_rest(tmp_path: Path, kind: str) -> None:
    origin, source, digest, single = await made(tmp_path)
    files, how = KINDS[kind]

    def agent() -> Agent:
        settings = AgentSettings((), "h1", "127.0.0.1:1", tmp_path / "store", origin=origin.url, scrub_s=0.0)
        return Agent(settings)

    first = agent()
    await first.start()
    assert await looked_at(first, tmp_path, how, source) == []
    view = await first.package_mounts.mount(MountRequest(str(IMAGE), str(tmp_path / "stays")))
    await first.stop()  # the view stays, for the next agent
    if kind in ("partial", "bitmap"):
        await asyncio.to_thread(partial, tmp_path / "store", digest, single)
    whole = tmp_path / "whole"
    subprocess.run(["cp", "-a", tmp_path / "store", whole], check=True)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    try:
        for trial in range(TRIALS):
            dice = random.Random(f"{kind} {trial}")
            if kind in COPIED:
                shutil.rmtree(tmp_path / "store")
                subprocess.run(["cp", "-a", whole, tmp_path / "store"], check=True)
            chosen = dice.choice(files(tmp_path / "store"))
            damage_row(chosen, dice) if kind == "document" else damage(chosen, dice)
            outcome = "right"
            try:
                second = agent()
            except P2PDistError as error:
                outcomes[f"does not start: {type(error).__name__}"] += 1
                continue
            try:
                await second.start()
                wrong += [f"{trial} {chosen.name}: {name}" for name in await looked_at(second, tmp_path, how, source)]
                output = tmp_path / "output"
                pull = await ended(second.pulls.start(PullRequest(blob=digest, output=str(output))))  # type: ignore[arg-type]
                if pull.error is not None:
                    outcome = f"pull fails: {pull.error.what[:60]}"
                elif output.read_bytes() != single:
                    wrong.append(f"{trial} {chosen.name}: the output")
            except P2PDistError as error:
                outcome = f"fails: {error.what[:60]}"
            finally:
                await second.stop()
            outcomes[outcome] += 1
    finally:
        subprocess.run(["umount", "-l", view.path], check=True)
    print(kind, dict(outcomes))
    assert wrong == []
    assert outcomes["right"], outcomes
