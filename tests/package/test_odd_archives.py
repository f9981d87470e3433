"""What odd archives and images become, as GNU tar and umoci unpack them; damaged ones are refused
whole."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import odd_archives as odd
import pytest
from test_archive_import import image_layout

from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, TooLarge
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.layout import LocalLayout
from p2pdist.package.archive.import_ import unpack_source
from p2pdist.package.archive.untar import Applied, apply_tar, finish
from p2pdist.package.pack import pack
from p2pdist.package.source.scan import source_path

REFERENCE = parse_reference("a/b:v1")
Tree = dict[bytes, tuple[str, int, bytes]]
"""By path: kind, mode, and what a file begins with or a link leads to."""


def tree(top: Path, modes: dict[bytes, int] | None = None) -> Tree:
    found: Tree = {}
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(os.fsencode(top), path)
        status = os.lstat(full)
        mode = (modes or {}).get(path, status.st_mode) & 0o1777
        if stat.S_ISDIR(status.st_mode):
            pending += [os.path.join(path, name) for name in os.listdir(full)]
            found[path] = "directory", mode, b""
        elif stat.S_ISLNK(status.st_mode):
            found[path] = "link", 0, os.readlink(full)
        else:
            with open(full, "rb") as file:
                found[path] = f"file of {status.st_size}, {status.st_nlink} names", mode, file.read(4096)
    del found[b""]
    return found


def imported(data: bytes, place: Path) -> tuple[Tree, tuple[str, ...], Path]:
    (place / "archive").write_bytes(data)
    (place / "work").mkdir()
    unpacked = unpack_source(place / "archive", place / "work")
    assert unpacked.kind == "tar"
    return tree(unpacked.root, unpacked.modes), unpacked.notes, unpacked.root


@pytest.mark.parametrize("name", odd.TAKEN)
def test_an_odd_archive_becomes_what_tar_makes_of_it(tmp_path: Path, name: str) -> None:
    found, notes, root = imported(odd.TAKEN[name], tmp_path)
    (tmp_path / "tar").mkdir()
    done = subprocess.run(
        ["tar", "--no-same-owner", "--preserve-permissions", "-xf", tmp_path / "archive", "-C", tmp_path / "tar"],
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert found == tree(tmp_path / "tar")
    assert bool(notes) == (name in ("something behind", "a second archive behind"))
    if name != "empty":
        assert found
    if b"sparse" in found:
        status = (root / "sparse").stat()
        assert (status.st_size, status.st_blocks * 512 < 1 << 20) == (odd.SPARSE_SIZE, True)
        with (root / "sparse").open("rb") as file:
            for number, (begin, length) in enumerate(odd.SPARSE[:-1]):
                file.seek(begin)
                assert file.read(length + 1) == odd.SPARSE_DATA[number * 512 :][:512] + b"\0"


@pytest.mark.parametrize("name", odd.DAMAGED)
def test_a_damaged_archive_is_refused(tmp_path: Path, name: str) -> None:
    """Wherever the damage is: nothing is taken of what stands before it."""
    with pytest.raises(TooLarge if name == "a size beyond all" else Corrupt):
        imported(odd.DAMAGED[name], tmp_path)


def apply(layers: list[bytes], root: Path) -> Applied:
    root.mkdir()
    state = Applied()
    for layer in layers:
        apply_tar(io.BytesIO(layer), root, state, vouched=True)
    finish(root, state)
    return state


EXPECTED: dict[str, set[bytes]] = {
    "behind a link": {b"usr", b"usr/lib", b"usr/lib/new", b"lib"},
    "behind an absolute link": {b"run", b"run/pid", b"var", b"var/run"},
    "behind a link to nothing": {b"lib", b"usr", b"usr/lib", b"usr/lib/a", b"usr/lib/a/new"},
    "behind links of links": {b"a", b"b", b"d", b"d/c", b"e", b"e/x"},
    "behind a link of its own layer": {b"lib", b"usr", b"usr/x", b"r", b"run", b"run/x"},
    "hidden behind a link": {b"usr", b"usr/kept", b"lib"},
    "all hidden behind a link": {b"u", b"u/new", b"l"},
    "a directory for a link": {b"u", b"u/old", b"l", b"l/x"},
    "modes of several layers": {b"a", b"d"},
}


@pytest.mark.parametrize("name", odd.LAYERS)
def test_layers_of_an_odd_image(tmp_path: Path, name: str) -> None:
    """Nothing is written outside, wherever links lead."""
    layers = [b"".join(entries) for entries in odd.LAYERS[name]]
    (tmp_path / "run").mkdir()
    state = apply(layers, tmp_path / "root")
    found = tree(tmp_path / "root", state.closed)
    if name in EXPECTED:
        assert found.keys() == EXPECTED[name]
    if name == "modes of several layers":
        assert (found[b"a"][1], found[b"d"][1], state.closed.keys()) == (0o644, 0o311, {b"d"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "run"]
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", odd.REFUSED_LAYERS)
def test_layers_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Corrupt):
        apply([b"".join(entries) for entries in odd.REFUSED_LAYERS[name]], tmp_path / "root")


def test_umoci_unpacks_odd_images_alike(tmp_path: Path) -> None:
    """All in one image, each below a directory of its own."""
    if not shutil.which("umoci"):
        pytest.skip("needs umoci")
    layers = odd.together(odd.LAYERS.items())
    image = image_layout(tmp_path / "image", layers, {})
    (tmp_path / "work").mkdir()
    unpacked = unpack_source(image, tmp_path / "work")
    subprocess.run(
        ["umoci", "raw", "unpack", "--rootless", "--image", f"{image}:latest", tmp_path / "umoci"],
        check=True,
        capture_output=True,
    )
    ours, theirs = tree(unpacked.root, unpacked.modes), tree(tmp_path / "umoci")
    for number, name in enumerate(odd.LAYERS):
        place = b"%d/" % number
        assert {path: entry for path, entry in ours.items() if path.startswith(place)} == {
            path: entry for path, entry in theirs.items() if path.startswith(place)
        }, name


def test_every_kind_of_damage_is_told_in_our_words(tmp_path: Path) -> None:
    """Cut off anywhere, an archive is a failure of the project's own, never one of a library."""
    data = odd.TAKEN["sparse of pax 1.0"] + odd.TAKEN["long names of GNU"]
    for length in range(0, 6000, 97):
        place = tmp_path / str(length)
        place.mkdir()
        with pytest.raises(P2PDistError, match=r"damaged|size|header"):
            imported(data[:length], place)


@pytest.mark.root
@pytest.mark.parametrize("format", ["tree", "squashfs"])
def test_another_user_imports_what_its_owner_may_not_read(
    entered_path: Path, format: Literal["tree", "squashfs"]
) -> None:
    """As root does, to the digest; and what comes out again has the modes of the archive."""
    temporary = Path(tempfile.gettempdir())
    above = (*Path(sys.executable).parents, temporary, *temporary.parents)
    if closed := [path for path in above if not path.stat().st_mode & 0o001]:
        pytest.skip(f"another user cannot reach what is below {closed[-1]}")
    archive = odd.TAKEN["modes"][: -len(odd.END)] + b"".join(odd.file(name, mode=0) for name in odd.ODD_NAMES) + odd.END
    (entered_path / "archive").write_bytes(archive)

    async def packed(place: Path) -> str:
        (place / "work").mkdir()
        found = unpack_source(entered_path / "archive", place / "work")
        layout = LocalLayout(place / "layout")
        try:
            return (await pack(found.root, REFERENCE, layout, format=format, modes=found.modes)).digest
        finally:
            await layout.close()

    digests = []
    for user in (0, 65534):
        place = entered_path / f"user{user}"
        place.mkdir()
        os.chown(place, user, user)
        digests.append(as_user(user, lambda place=place: asyncio.run(packed(place))))  # type: ignore[misc]
    assert digests[0] == digests[1]
    assert digests[0].startswith("sha256:")


def as_user(user: int, act: Callable[[], str]) -> str:
    """What `act` returns, or raises, in a process of another user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the modules are loaded, so the new user needs no access to the installation
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.write(writer, act().encode())
        except BaseException as error:
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        text = said.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize("name", [b"", b".", b"./"])
def test_a_file_without_a_name_is_refused(tmp_path: Path, name: bytes) -> None:
    """The top directory may be named so; the content of a file would be lost."""
    with pytest.raises(Corrupt, match="without a name"):
        imported(odd.header(name, b"2", link=b"a") + odd.END, tmp_path)


def test_times_before_1970_stay(tmp_path: Path) -> None:
    """In base 256, as GNU tar writes them; an image gets the nearest that it can hold, and a
    note."""
    early = (256**12 - 86400).to_bytes(12, "big")
    (tmp_path / "archive").write_bytes(odd.file(b"old", mtime=early) + odd.file(b"new") + odd.END)
    kept: dict[str, int] = {}
    for form in ("tree", "squashfs"):
        work = tmp_path / form
        work.mkdir()
        unpacked = unpack_source(tmp_path / "archive", work, form=form)  # type: ignore[arg-type]
        kept[form] = (unpacked.root / "old").stat().st_mtime_ns
        assert [("1 entry has a modification time" in note) for note in unpacked.notes] == [True] * (form == "squashfs")
    assert kept == {"tree": -86400 * 10**9, "squashfs": 0}


def test_attributes_that_give_rights_are_named(tmp_path: Path) -> None:
    """As setuid bits are: a program that lacks them does not do what it did."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, records in {
            "ping": {"SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x20" + "\0" * 14},
            "shared": {"SCHILY.acl.access": "user::rw-,user:1000:rw-,group::r--,mask::rw-,other::r--"},
            "labelled": {"RHT.security.selinux": "system_u:object_r:etc_t:s0"},
            "marked": {"SCHILY.xattr.user.a%3Db": "value"},
        }.items():
            member = tarfile.TarInfo(name)
            member.pax_headers = records
            archive.addfile(member)
    (tmp_path / "archive").write_bytes(out.getvalue())
    dropped: dict[str, set[tuple[str, str]]] = {}
    for form in ("tree", "squashfs"):
        work = tmp_path / form
        work.mkdir()
        unpacked = unpack_source(tmp_path / "archive", work, form=form)  # type: ignore[arg-type]
        dropped[form] = {(item.path, item.what) for item in unpacked.seen.dropped}
    named = {("ping", "file capabilities"), ("shared", "access control list")}
    assert dropped["squashfs"] == named | {("marked", "extended attributes")}
    if dropped["tree"] == named:  # else the file system of tests has none
        assert os.getxattr(tmp_path / "tree/archive/marked", "user.a=b") == b"value"


@pytest.mark.parametrize("data", [b"hello world\n" * 100, b"PK\3\4" + bytes(600), b"\x04\x22\x4d\x18" + bytes(90)])
def test_what_is_no_tar_is_called_so(tmp_path: Path, data: bytes) -> None:
    """A zip or an lz4 is no damaged tar: copying it again does not help."""
    with pytest.raises(Corrupt, match="is no tar"):
        imported(data, tmp_path)


def test_an_archive_that_takes_much_memory_is_called_so(tmp_path: Path) -> None:
    """It is whole, and zstd(1) unpacks it when it is allowed to."""
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([(30 - 10) << 3])  # RFC 8878: magic, descriptor, window of 1 GiB
    with pytest.raises(TooLarge, match=r"window of over 128 MiB.*--long=27"):
        imported(frame + bytes(600), tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_archive_comes_through_a_pipe(tmp_path: Path, compressed: bool) -> None:
    """As of `docker save NAME | p2pdist import -`, of a FIFO and of <(...) of a shell, a few bytes
    at a time."""
    data = odd.file(b"name", b"x" * 70_000) + odd.END
    data = gzip.compress(data) if compressed else data
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")

    def write() -> None:
        with open(tmp_path / "fifo", "wb", buffering=0) as pipe:
            for part in (data[:2], data[2:5], data[5:]):
                pipe.write(part)

    with ThreadPoolExecutor() as pool:
        written = pool.submit(write)
        (tmp_path / "work").mkdir()
        unpacked = unpack_source(source_path(tmp_path / "link", "archive"), tmp_path / "work")
        written.result()
    assert (unpacked.root / "name").stat().st_size == 70_000
    with pytest.raises(NotFound, match="it is a device"):
        unpack_source(Path("/dev/null"), tmp_path / "work")


def _write(end: int, data: bytes) -> None:
    with open(end, "wb") as pipe:
        pipe.write(data)


@pytest.mark.parametrize("kind", ["socket", "removed file", "file that was read from", "pipe"])
def test_standard_input_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    """Programs hand over sockets, and files that have no name any more. A name of the descriptor
    leads to none of them."""
    data = odd.file(b"name", b"x" * 70_000) + odd.END
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        if kind == "socket":
            reader, writer = map(stack.enter_context, socket.socketpair())
            pool.submit(lambda: (writer.sendall(data), writer.close()))
            number = reader.fileno()
        elif kind == "pipe":
            number, end = os.pipe()
            stack.callback(os.close, number)
            pool.submit(_write, end, data)
        else:
            file = stack.enter_context(tempfile.TemporaryFile(dir=tmp_path, buffering=0))
            file.write((b"before" if kind != "removed file" else b"") + data)
            file.seek(-len(data), os.SEEK_END)
            number = file.fileno()
        (tmp_path / "work").mkdir()
        unpacked = unpack_source(source_path(Path(f"/dev/fd/{number}"), "archive"), tmp_path / "work")
    assert (unpacked.root / "name").stat().st_size == 70_000


def test_a_socket_that_breaks_is_not_a_disk_that_does(tmp_path: Path) -> None:
    reader, writer = socket.socketpair()
    with reader:
        reader.sendall(b"unread")
        writer.sendall(odd.file(b"name", b"x"))
        writer.close()  # which resets it, since something was not read (unix(7))
        (tmp_path / "work").mkdir()
        with pytest.raises(P2PDistError, match=r"cannot read the archive on: Connection reset.*writer"):
            unpack_source(Path(f"/dev/fd/{reader.fileno()}"), tmp_path / "work")


def test_settings_of_an_image_that_no_program_can_have(tmp_path: Path) -> None:
    """Runtimes of containers ignore entries without a name or a value, and end ".." at the root."""
    config = {"Env": ["A=1", "NAMELESS", "=x", "B="], "WorkingDir": "/../../srv/./app/.."}
    image_layout(tmp_path / "image", [odd.file(b"file") + odd.END], config)
    (tmp_path / "work").mkdir()
    unpacked = unpack_source(tmp_path / "image", tmp_path / "work")
    assert unpacked.config.env == ("A=1", "B=")
    assert unpacked.config.working_dir == "/srv"
    assert ["NAMELESS" in note for note in unpacked.notes] == [True]


@pytest.mark.parametrize("alone", [True, False])
def test_an_image_in_a_folder_of_an_archive(tmp_path: Path, alone: bool) -> None:
    """The image, where nothing else is in the archive; else its files, and a word."""
    image_layout(tmp_path / "from/image", [odd.file(b"file") + odd.END], {})
    if not alone:
        (tmp_path / "from/readme").touch()
    subprocess.run(["tar", "cf", tmp_path / "tar", *os.listdir(tmp_path / "from")], cwd=tmp_path / "from", check=True)
    (tmp_path / "work").mkdir()
    unpacked = unpack_source(tmp_path / "tar", tmp_path / "work")
    assert unpacked.kind == ("OCI image" if alone else "tar")
    assert os.listdir(unpacked.root) == ["file"] if alone else "image in it holds" in unpacked.notes[0]


def test_an_index_of_nothing_is_called_so(tmp_path: Path) -> None:
    image_layout(tmp_path / "image", [odd.file(b"file") + odd.END], {})
    (tmp_path / "image/index.json").write_text('{"schemaVersion": 2, "manifests": []}')
    (tmp_path / "work").mkdir()
    with pytest.raises(NotFound, match="there is no image in it"):
        unpack_source(tmp_path / "image", tmp_path / "work")


def test_an_empty_list_is_no_docker_archive(tmp_path: Path) -> None:
    """Web applications have a manifest.json of their own."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/manifest.json").write_text("[]\n")
    assert unpack_source(tmp_path / "app", tmp_path / "nowhere").kind == "directory"
    found, _, _ = imported(odd.file(b"manifest.json", b"[]\n") + odd.END, tmp_path)
    assert set(found) == {b"manifest.json"}


def test_a_command_that_is_one_string_is_a_word(tmp_path: Path) -> None:
    """Docker takes it so (strslice), of images that old tools made."""
    config = {"Entrypoint": "/bin/run me", "Cmd": ["x"]}
    image_layout(tmp_path / "image", [odd.file(b"file") + odd.END], config)
    (tmp_path / "work").mkdir()
    assert unpack_source(tmp_path / "image", tmp_path / "work").config.entrypoint == ("/bin/run me", "x")


def test_an_image_of_too_many_layers_is_called_so(tmp_path: Path) -> None:
    image_layout(tmp_path / "image", [odd.file(b"%d" % number) + odd.END for number in range(129)], {})
    (tmp_path / "work").mkdir()
    with pytest.raises(TooLarge, match="129 layers, over the limit of 128"):
        unpack_source(tmp_path / "image", tmp_path / "work")
