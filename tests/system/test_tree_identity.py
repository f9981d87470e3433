"""Whole processes: what was packed from a directory is what a host shows of it, entry by entry, by
every way of showing."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_rig import Agent, Site

sys.path.extend(str(Path(__file__).parents[1] / other) for other in ("mount", "package", "store"))

from btrfs_rig import mounted_btrfs
from shown_trees import Seen, Store, finish, lay_out, random_tree, walk, without_groups
from tree_edits import Edits

from p2pdist.agent.api.client import LocalClient
from p2pdist.model.messages import MountRequest
from p2pdist.model.tree import WHOLE_MAX, Whiteout

MIB = 1 << 20
GIB = 1 << 30
SLACK = 128 << 10
"""So much more than its source a large file may take on another file system."""

pytestmark = pytest.mark.root


class Chain:
    """A directory, what is published of it, and one agent that shows it."""

    def __init__(self, site: Site, agent: Agent, name: str) -> None:
        self.site, self.agent, self.name = site, agent, name
        self.source = site.directory / name
        self._client = LocalClient(agent.socket)

    def publish(self, version: str, source: Path, *more: str) -> None:
        """Pack, push and pull."""
        layout = ("--layout", str(self.site.directory / f"layout-{self.name}"))
        reference = f"{self.name}:{version}"
        for words in (
            ("pack", str(source), "-t", reference, *more),
            ("push", reference, "--origin", f"file://{self.site.layout}"),
        ):
            code, _, errors = self.site.command(*words, *layout)
            assert code == 0, errors
        self.agent.pull(package=reference)

    @contextlib.contextmanager
    def shown(self, version: str, how: str) -> Iterator[Path]:
        """The package where it is shown, once."""
        done = self._client.mount(MountRequest(f"{self.name}:{version}", how=how))
        assert done.how == ("erofs" if how == "overlay" else how), done.why
        try:
            yield Path(done.path)
        finally:
            self._client.unmount(done.path)

    def compare(self, version: str, how: str, wanted: dict[bytes, Seen]) -> None:
        """Each entry is as it was packed. Hard links to objects make one file of equal contents,
        and break no group."""
        with self.shown(version, how) as view:
            seen = walk(view)
            if how == "hardlink":
                assert all(seen[path].same == seen[one.same].same for path, one in wanted.items() if one.same)
                seen, wanted = without_groups(seen), without_groups(wanted)
            assert seen.keys() == wanted.keys()
            assert [path for path in seen if seen[path] != wanted[path]] == []
            for path in map(os.fsdecode, (path for path, one in wanted.items() if len(one.data) > WHOLE_MAX)):
                assert taken(view / path) <= taken(self.source / path) + SLACK, path


def taken(path: Path) -> int:
    """What `du` says of a file."""
    return path.stat().st_blocks * 512


def generate(source: Path, seed: int, aside: Path) -> None:
    """A directory with entries of every kind that a tree carries, and names of every kind that
    there are."""
    store = Store(aside)
    entries = [entry for entry in random_tree(seed, store, count=120) if not isinstance(entry, Whiteout)]
    lay_out(entries, store, source)
    finish(entries, source)
    choose = random.Random(seed)
    place = source / "-rf" / ".hidden " / "new\nline" / "back\\slash" / "\udcff\udc80"
    place.mkdir(parents=True)
    (source / "empty" / "inner").mkdir(parents=True)
    for number, mode in enumerate((0, 0o400, 0o1777, 0o111)):
        (place / f"{number}").write_bytes(b"small" * number)
        (place / f"{number}").chmod(mode)
        os.link(place / f"{number}", source / f"-{number}")
    for number, size in enumerate(
        (WHOLE_MAX - 1, WHOLE_MAX, WHOLE_MAX + 1, choose.randrange(WHOLE_MAX, 3 * WHOLE_MAX))
    ):
        (place / f"large{number}").write_bytes(choose.randbytes(size))
    os.link(place / "large3", place / "large3 again")
    os.link(place / "large3", source / "large3")
    with (source / "holes").open("wb") as file:
        for at in (choose.randrange(MIB), 20 * MIB + choose.randrange(MIB)):
            file.seek(at)
            file.write(choose.randbytes(choose.randrange(1, 300_000)))
        file.truncate(40 * MIB + choose.randrange(2))
    for name, target in (("loop", "loop"), ("to", "-rf"), ("there", "/etc"), ("gone", "../\udcff"), ("up", "../..")):
        (place / name).symlink_to(target)
    os.utime(place / "loop", ns=(0, -1), follow_symlinks=False)


def edit(source: Path, seed: int) -> None:
    """Make the next version: changes at random, some of each kind in any case."""
    edits = Edits(source, seed)
    edits.some(25)
    for change in (edits.become_directory, edits.become_file, edits.link, edits.symlink, edits.mode, edits.touch):
        change()
    link = edits.fresh()
    link.symlink_to("nowhere")
    os.replace(edits.write(), link)
    for path in edits.paths():
        found = path.lstat()
        if stat.S_ISFIFO(found.st_mode):
            path.unlink()
        elif found.st_mode & stat.S_ISUID:
            path.chmod(0o755)
    large = [path for path in edits.paths() if not path.is_symlink() and path.is_file() and path.stat().st_size > MIB]
    for path in large[::2]:
        with path.open("r+b") as file:
            middle = path.stat().st_size // 2
            file.seek(middle)
            after = file.read(MIB)
            file.seek(middle)
            file.write(b"inserted" + after)


def check(site: Site, agent: Agent, seed: int, ways: tuple[str, ...]) -> None:
    """Two versions of a generated tree by each way, and the first one again."""
    chain = Chain(site, agent, f"tree{seed}")
    generate(chain.source, seed, site.directory / f"aside{seed}")
    chain.publish("v1", chain.source, "--format", "tree", "--xattrs")
    first = walk(chain.source)
    for how in ways:
        chain.compare("v1", how, first)
    edit(chain.source, seed)
    chain.publish("v2", chain.source, "--format", "tree", "--xattrs")
    second = walk(chain.source)
    assert first != second
    for how in ways:
        chain.compare("v2", how, second)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=pytest.mark.long)])
def test_a_generated_tree_and_its_next_version(site: Site, seeds: range) -> None:
    (agent,) = site.agents(1)
    for seed in seeds:
        check(site, agent, seed, ("erofs", "hardlink", "copy"))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 13), marks=pytest.mark.long)])
def test_the_same_from_a_store_on_btrfs(site: Site, tmp_path: Path, seeds: range) -> None:
    with mounted_btrfs(tmp_path) as btrfs:
        agent = Agent(site, "h0", store=str(btrfs / "store"))
        agent.start()
        for seed in seeds:
            check(site, agent, seed + 100, ("reflink", "erofs", "hardlink"))
            for name in ("v1", "v2"):
                LocalClient(agent.socket).remove(f"tree{seed + 100}:{name}")
        assert agent.stop() == 0


@pytest.mark.slow
def test_an_image_on_top_of_a_tree(site: Site) -> None:
    """An application as squashfs over a tree: what is neither in the image nor hidden by it is the
    tree's, times and all."""
    (agent,) = site.agents(1)
    chain = Chain(site, agent, "app")
    generate(chain.source, 7, site.directory / "aside")
    chain.publish("base", chain.source, "--format", "tree", "--xattrs")
    top = site.directory / "top"
    (top / "bin").mkdir(parents=True)
    (top / "bin/app").write_text("an application")
    (top / "large3").write_text("another file")
    os.mknod(top / "empty", stat.S_IFCHR, 0)
    for path in (top / "bin/app", top / "bin", top / "large3"):
        os.utime(path, (0, 1_700_000_000))  # an image keeps seconds
    chain.publish("v1", top, "--base", "app:base")
    (top / "empty").unlink()
    below = {path: one for path, one in walk(chain.source).items() if path.split(b"/")[0] != b"empty"}
    wanted = without_groups(below | walk(top))
    for how in ("overlay", "hardlink"):
        with chain.shown("v1", how) as view:
            seen = without_groups(walk(view))
            assert seen.keys() == wanted.keys()
            assert [path for path in seen if seen[path] != wanted[path]] == []


@pytest.mark.slow
def test_a_file_that_is_nearly_all_hole(site: Site) -> None:
    """Neither packing nor pulling, showing or exporting makes it larger than its source; so it fits
    into a store that is smaller."""
    size = 5 * GIB
    (agent,) = site.agents(1, capacity="1GiB")
    chain = Chain(site, agent, "sparse")
    chain.source.mkdir()
    with (chain.source / "disk").open("wb") as file:
        for at in (1, size // 2 + 3, size - 7):
            file.seek(at)
            file.write(b"content")
    chain.publish("v1", chain.source, "--format", "tree")
    layout = site.directory / "layout-sparse"
    assert sum(map(taken, layout.glob("blobs/sha256/*"))) < 4 * MIB
    for how in ("erofs", "hardlink", "copy"):
        with chain.shown("v1", how) as view, (view / "disk").open("rb") as file:
            assert file.seek(0, os.SEEK_END) == size
            assert taken(view / "disk") <= taken(chain.source / "disk") + SLACK
            for at in (1, size // 2 + 3, size - 7):
                file.seek(at - 1)
                assert file.read(9) == b"\0content\0"[: size - at + 1]
    exported = site.directory / "exported"
    words = ("export", "sparse:v1", "--dir", "-o", str(exported), "--layout", str(layout))
    assert site.command(*words)[0] == 0
    assert (exported / "disk").stat().st_size == size
    assert taken(exported / "disk") <= taken(chain.source / "disk") + SLACK
