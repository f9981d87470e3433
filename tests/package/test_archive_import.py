"""Importing directories, tars and images, friendly and hostile ones."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, UsageError
from p2pdist.package.archive.import_ import Unpacked, unpack_source
from p2pdist.package.archive.untar import Applied, apply_tar, finish
from p2pdist.removal import remove_tree

Entry = tuple[str, Any]
"""Name, and: str for a file, None for a directory, ("link", to), ("hard", to), or a tarfile.TarInfo
type for something else."""


def tar_of(*entries: Entry, **more: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, what in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = more.get("mode", 0o644), 1_600_000_000
            content = b""
            if what is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(what, str):
                content = what.encode()
                member.size = len(content)
            elif isinstance(what, tuple):
                member.type = tarfile.SYMTYPE if what[0] == "link" else tarfile.LNKTYPE
                member.linkname = what[1]
            else:
                member.type = what
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def applied(target: Path, *layers: bytes) -> Applied:
    target.mkdir(exist_ok=True)
    state = Applied()
    for layer in layers:
        apply_tar(io.BytesIO(layer), target, state)
    finish(target, state)
    return state


def content(directory: Path) -> dict[str, str]:
    """Everything below a directory: files with their text, links with "-> target", directories with
    "/"."""
    found = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_entries_keep_what_a_package_can_carry(tmp_path: Path) -> None:
    layer = tar_of(
        ("./", None),
        ("./a/", None),
        ("./a/file", "text"),
        ("/absolute", "kept below"),
        ("implied/deep/file", "x"),
        ("link", ("link", "/etc/passwd")),
        ("again", ("hard", "a/file")),
        ("null", tarfile.CHRTYPE),
        ("pipe", tarfile.FIFOTYPE),
        mode=0o4755,
    )
    state = applied(tmp_path / "root", layer)
    assert content(tmp_path / "root") == {
        "a": "/", "a/file": "text", "absolute": "kept below", "implied": "/", "implied/deep": "/",
        "implied/deep/file": "x", "link": "-> /etc/passwd", "again": "text",
    }  # fmt: skip
    status = (tmp_path / "root/a/file").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime, status.st_nlink) == (0o755, 1_600_000_000, 2)
    assert (tmp_path / "root/a").stat().st_mtime == 1_600_000_000
    assert {(item.path, item.what) for item in state.seen.dropped} >= {
        ("null", "character device"), ("pipe", "FIFO"), ("a/file", "setuid bit"),
    }  # fmt: skip


def test_hard_links_to_what_is_left_out_are_left_out(tmp_path: Path) -> None:
    """As in archives of a root file system with two names for one device."""
    state = applied(
        tmp_path / "root",
        tar_of(("dev/null", tarfile.CHRTYPE), ("pipe", tarfile.FIFOTYPE), ("link", "1"), ("kept", "1")),
        tar_of(("dev/zero", ("hard", "dev/null")), ("link", ("hard", "pipe")), ("third", ("hard", "dev/zero"))),
    )
    assert content(tmp_path / "root") == {"dev": "/", "kept": "1"}
    assert [(item.path, item.what) for item in state.seen.dropped] == [
        ("dev/null", "character device"), ("pipe", "FIFO"), ("dev/zero", "character device"), ("link", "FIFO"),
        ("third", "character device"),
    ]  # fmt: skip


def test_what_is_left_out_replaces_what_was_there(tmp_path: Path) -> None:
    """A device hides the file of a lower layer, as it does in the image itself."""
    lower = tar_of(("config", "of the lower layer"), ("link", ("link", "config")), ("dir/file", "1"), ("kept", "1"))
    upper = tar_of(("config", tarfile.CHRTYPE), ("link", tarfile.FIFOTYPE), ("dir", tarfile.BLKTYPE))
    applied(tmp_path / "root", lower, upper)
    assert content(tmp_path / "root") == {"kept": "1"}


def test_layers_replace_and_hide(tmp_path: Path) -> None:
    """Whiteouts hide what is below, never what their own layer brings, in whatever order it
    comes."""
    lower = tar_of(
        ("keep", "1"), ("gone", "1"), ("dir/one", "1"), ("dir/two", "1"), ("opaque/old", "1"), ("opaque/sub/old", "1"),
        ("file", "1"), ("tree/x", "1"), ("mixed/old", "1"), ("link", ("link", "keep")),
    )  # fmt: skip
    upper = tar_of(
        (".wh.gone", ""), ("dir/.wh.one", ""), ("opaque/new", "2"), ("opaque/sub/new", "2"), ("opaque/.wh..wh..opq", ""),
        ("file", None), ("file/now/a directory", "2"), ("tree", "2"), ("mixed/new", "2"), (".wh.mixed", ""), (".wh.never", ""),
        ("nowhere/.wh.x", ""), (".wh..wh.plnk/1", ""), ("link", "2"),
    )  # fmt: skip
    applied(tmp_path / "root", lower, upper)
    assert content(tmp_path / "root") == {
        "keep": "1", "dir": "/", "dir/two": "1", "opaque": "/", "opaque/new": "2", "opaque/sub": "/", "opaque/sub/new": "2",
        "file": "/", "file/now": "/", "file/now/a directory": "2", "tree": "2", "mixed": "/", "mixed/new": "2", "link": "2",
    }  # fmt: skip


def test_directories_of_any_depth_are_hidden(tmp_path: Path) -> None:
    deep = "/".join("d" * 998)
    applied(tmp_path / "root", tar_of((deep, None), (f"{deep}/file", "x")), tar_of((".wh.d", "")))
    assert content(tmp_path / "root") == {}
    applied(tmp_path / "own", tar_of(("d/old", "x")), tar_of((f"{deep}/file", "x"), (".wh..wh..opq", "")))
    assert (tmp_path / "own" / deep / "file").exists()
    assert not (tmp_path / "own/d/old").exists()
    remove_tree(tmp_path / "own")


def test_what_is_removed_costs_what_is_in_it(tmp_path: Path) -> None:
    """And not a look at all directories of the image: an opaque directory may hide thousands."""

    class Unlisted(dict[bytes, Any]):
        def __iter__(self) -> Iterator[bytes]:
            raise AssertionError("all that is known was looked at")

    (tmp_path / "root").mkdir()
    state = Applied(directories=Unlisted(), closed=Unlisted())
    lower = tar_of(*((f"p/d{number}", None) for number in range(20)), ("p/d1/file", "x"), ("q", None))
    for layer in (lower, tar_of(("p/.wh..wh..opq", ""), ("p/d1", None))):
        apply_tar(io.BytesIO(layer), tmp_path / "root", state)
    assert set(state.directories.keys()) == {b"p", b"p/d1", b"q"}
    assert content(tmp_path / "root") == {"p": "/", "p/d1": "/", "q": "/"}


@pytest.mark.parametrize(
    "entries",
    [
        [("../out", "x")],
        [("a/../../out", "x")],
        [("link", ("link", "..")), ("link/out", "x")],
        [("link", ("link", "/")), ("link/etc/out", "x")],
        [("a", None), ("a/link", ("link", "../..")), ("a/link/out", "x")],
        [("hard", ("hard", "../secret"))],
        [("link", ("link", "..")), ("hard", ("hard", "link/secret"))],
        [("link", ("link", "../secret")), ("hard", ("hard", "link"))],
        [("hard", ("hard", "absent"))],
        [("link", ("link", "..")), ("link/.wh.secret", "")],
        [("link", ("link", "..")), ("link/.wh..wh..opq", "")],
        [("../.wh.secret", "")],
        [(".wh...", "")],
        [("file", "x"), ("file/x", "x")],
        [("a" * 300, "x")],
        [("/".join("a" * 2 for _ in range(1500)), "x")],
    ],
)
def test_nothing_leaves_the_directory(tmp_path: Path, entries: list[Entry]) -> None:
    """Neither written, nor linked in, nor removed; and the failure is told as one of the
    archive."""
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(Corrupt):
        applied(tmp_path / "root", tar_of(*entries))
    assert (tmp_path / "secret").stat().st_nlink == 1
    assert {path.name for path in tmp_path.iterdir()} == {"root", "secret"}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    layer = tar_of(("a", ("link", "../victim")), ("a", "mine"), ("b", ("link", "..")), ("b", None), ("b/x", "in b"))
    applied(tmp_path / "root", layer)
    assert content(tmp_path / "root") == {"a": "mine", "b": "/", "b/x": "in b"}
    assert (tmp_path / "victim").read_text() == "untouched"


@pytest.mark.parametrize("target", ["", "x" * 5000])
def test_a_link_to_an_impossible_name_is_corrupt(tmp_path: Path, target: str) -> None:
    with pytest.raises(Corrupt, match="symbolic link"):
        applied(tmp_path / "root", tar_of(("link", ("link", target))))


def header(kind: bytes, data: bytes, *, size: int | None = None) -> bytes:
    """A header of a type of tarfile's, with what follows it."""
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, len(data) if size is None else size
    return member.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


class Endless(io.RawIOBase):
    """A beginning, then one block over and over. Counts what is read."""

    def __init__(self, beginning: bytes, block: bytes) -> None:
        self._rest, self._block, self.count = beginning, block, 0

    def read(self, length: int = -1) -> bytes:
        self._rest += self._block * (-(-(length - len(self._rest)) // len(self._block)))
        data, self._rest = self._rest[:length], self._rest[length:]
        self.count += len(data)
        return data


SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
MORE_SPARSE = b"1".rjust(12, b"0") * 42 + bytes([1]) + bytes(7)
"""A block of 21 pieces of a sparse file, with another one behind it."""


@pytest.mark.parametrize(
    ("beginning", "block"),
    [
        *((header(kind, b"", size=1 << 40), b"a" * 512) for kind in (b"L", b"K", b"x", b"g", b"X")),
        (b"", header(b"L", b"a" * 500)),
        (b"", header(b"g", b"9 a=bcde\n")),
        (header(b"x", SPARSE) + header(b"0", b"", size=512), b"99999999\n" + b"1\n" * 200),
        (header(b"S", b"")[:386] + MORE_SPARSE[:96] + b"\1" + bytes(29), MORE_SPARSE),
    ],
    ids=["name", "link", "pax", "global", "solaris", "names", "globals", "sparse 1.0", "sparse"],
)
def test_endless_headers_are_not_kept(tmp_path: Path, beginning: bytes, block: bytes) -> None:
    """Neither one that is said to be long, nor many that each tell more of the next."""
    (tmp_path / "root").mkdir()
    if beginning[156:157] == b"S":
        head = bytearray(beginning)
        head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:512]))
        beginning = bytes(head)
    stream = Endless(beginning, block)
    with pytest.raises(Corrupt):
        apply_tar(stream, tmp_path / "root", Applied())
    assert stream.count < 2 << 20


@pytest.mark.parametrize(
    "records",
    [
        b"2 " * 200_000 + b"=",
        b"1" * 500_000,
        b"9 a=" + b"1" * 500_000,
        b"8 001=1\n30 a=1\n",
        b"5 =1\n",
    ],
)
@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_broken_pax_records_are_corrupt(tmp_path: Path, kind: bytes, records: bytes) -> None:
    """Before anything is made of them: each of a row of records that overlap would have a key up to
    the end of all of them."""
    with pytest.raises(Corrupt, match="pax header"):
        applied(tmp_path / "root", header(kind, records) + header(b"0", b"") + bytes(1024))


def test_global_records_are_few(tmp_path: Path) -> None:
    entries = b"".join(header(b"g", b"8 %03d=1\n" % number) + header(b"0", b"") for number in range(200))
    with pytest.raises(Corrupt, match="global"):
        applied(tmp_path / "root", entries + bytes(1024))


@pytest.mark.parametrize(
    ("told", "expected_ns"),
    [
        ("1600000000.123456789", 1_600_000_000_123_456_789),
        ("1e900000", 0), ("9" * 200, 0), ("nan", 0), ("-1", -10**9), ("-1.5", -15 * 10**8),
        ("1e-900000", 0), ("17179869183", 0), ("inf", 0),
    ],
)  # fmt: skip
def test_times_of_pax_headers(tmp_path: Path, told: str, expected_ns: int) -> None:
    """Impossible ones are 0, and cost nothing."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("file")
        member.pax_headers = {"mtime": told}
        archive.addfile(member)
    applied(tmp_path / "root", out.getvalue())
    assert (tmp_path / "root/file").stat().st_mtime_ns == expected_ns


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_files_and_long_names_of_another_tool(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / ("long" * 50)).open("wb") as file:
        for number in range(300):
            file.seek(number * 65536)
            file.write(b"x")
    command = ["tar", "-S", f"--format={form}", "-C", source, "-cf", tmp_path / "a.tar", "."]
    subprocess.run(command, check=True)
    assert (tmp_path / "a.tar").stat().st_size < 300 * 16384
    found = unpacked(tmp_path / "a.tar", tmp_path / "work")
    assert (found.root / ("long" * 50)).read_bytes() == (source / ("long" * 50)).read_bytes()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_archives_are_corrupt(tmp_path: Path, seed: int) -> None:
    """Whatever is broken, a failure of the project is raised, never one of the library."""
    good = gzip.compress(tar_of(*((f"f{number}", "x" * 3000) for number in range(20))), mtime=0)
    broken = bytearray(good)
    if seed < 4:
        broken = broken[: len(broken) * (seed + 1) // 5]
    else:
        for position in range(20 + seed, len(broken), 37 + seed):
            broken[position] ^= 1 << seed % 8
    (tmp_path / "x.tgz").write_bytes(broken)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(P2PDistError):
        unpack_source(tmp_path / "x.tgz", work)


def unpacked(source: Path, work: Path, **more: str) -> Unpacked:
    work.mkdir()
    return unpack_source(source, work, **more)


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, lzma.compress, bz2.compress, zstandard.ZstdCompressor().compress]
)
def test_tars_of_any_compression(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """The compression is told from the bytes. Names that would be whiteouts in an image are plain
    files."""
    (tmp_path / "some archive").write_bytes(compress(tar_of(("a/b", "text"), ("a/.wh.c", "plain"))))
    found = unpacked(tmp_path / "some archive", tmp_path / "work")
    assert found.kind == "tar"
    assert content(found.root) == {"a": "/", "a/b": "text", "a/.wh.c": "plain"}


def test_a_directory_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    assert unpacked(tmp_path / "source", tmp_path / "work").root == tmp_path / "source"
    with pytest.raises(NotFound):
        unpack_source(tmp_path / "absent", tmp_path / "work")


# -- images


def image_layout(
    place: Path, layers: list[bytes], run: dict[str, Any], *, compress: bool = True, form: str = ""
) -> Path:
    """An OCI image layout with one image; `form` is the media type of its layers, "" one of OCI for
    gzip."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    suffix = "+gzip" if compress else ""
    kind = form or f"application/vnd.oci.image.layer.v1.tar{suffix}"
    pack = zstandard.compress if kind.endswith("zstd") else partial(gzip.compress, mtime=0)
    described = [blob(pack(layer) if compress else layer, kind) for layer in layers]
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = {"architecture": "amd64", "os": "linux", "config": run, "rootfs": {"type": "layers", "diff_ids": ids}}
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    entry = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


LAYERS = [
    tar_of(("bin/sh", "sh"), ("etc/gone", "x"), ("etc/alternatives/python", ("link", "/usr/bin/python3"))),
    tar_of(("etc/.wh.gone", ""), ("app/train.py", "print(1)")),
]
RUN = {"Entrypoint": ["python"], "Cmd": ["train.py"], "Env": ["A=1", "B=x=y"], "WorkingDir": "/app"}
EXPECTED = {
    "bin": "/", "bin/sh": "sh", "etc": "/", "etc/alternatives": "/", "etc/alternatives/python": "-> /usr/bin/python3",
    "app": "/", "app/train.py": "print(1)",
}  # fmt: skip


def check(found: Unpacked) -> None:
    assert content(found.root) == EXPECTED
    assert found.config.entrypoint == ("python", "train.py")
    assert found.config.env == ("A=1", "B=x=y")
    assert found.config.working_dir == "/app"


def test_an_image_layout_and_a_tar_of_it(tmp_path: Path) -> None:
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    found = unpacked(layout, tmp_path / "1")
    assert found.kind == "OCI image"
    check(found)
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(layout, ".")
    check(unpacked(tmp_path / "image.tar", tmp_path / "2"))


@pytest.mark.parametrize(
    "form",
    [
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.diff.tar.zstd",
        "application/vnd.oci.image.layer.v1.tar+zstd",
    ],
)
def test_layers_of_any_type(tmp_path: Path, form: str) -> None:
    """BuildKit gives layers the types of Docker unless it is told oci-mediatypes=true."""
    check(unpacked(image_layout(tmp_path / "image", LAYERS, RUN, form=form), tmp_path / "work"))


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive", "dir"])
def test_images_that_another_tool_wrote(tmp_path: Path, kind: str) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("needs skopeo")
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    target = tmp_path / "copied"
    command = ["skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{layout}:latest"]
    subprocess.run([*command, f"{kind}:{target}" if kind == "dir" else f"{kind}:{target}:some/name:v1"], check=True)
    found = unpacked(target, tmp_path / "work")
    assert found.kind == {"docker-archive": "docker archive", "dir": "image directory"}.get(kind, "OCI image")
    check(found)


def image_directory(layout: Path, place: Path, *, several: bool) -> Path:
    """The image of a layout as skopeo writes it to dir:PATH (containers-transports(5)); with
    `several` as it does with --all, a list of images for two platforms."""
    shutil.copytree(layout / "blobs/sha256", place)
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    digits = entry["digest"].removeprefix("sha256:")
    (place / "version").write_text("Directory Transport Version: 1.1\n")
    manifest = (place / digits).read_bytes()
    (place / digits).unlink()
    if several:
        (place / f"{digits}.manifest.json").write_bytes(manifest)
        other = {**entry, "platform": {"architecture": "s390x", "os": "linux"}, "digest": "sha256:" + "0" * 64}
        manifest = json.dumps({"schemaVersion": 2, "manifests": [other, entry]}).encode()
    (place / "manifest.json").write_bytes(manifest)
    return place


@pytest.mark.parametrize("several", [False, True])
def test_an_image_that_was_copied_to_a_directory(tmp_path: Path, several: bool) -> None:
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    place = image_directory(layout, tmp_path / "copied", several=several)
    found = unpacked(place, tmp_path / "1")
    assert found.kind == "image directory"
    check(found)
    with tarfile.open(tmp_path / "copied.tar", "w") as archive:
        archive.add(place, "copied")
    check(unpacked(tmp_path / "copied.tar", tmp_path / "2"))
    with pytest.raises(NotFound, match="other"):
        unpacked(place, tmp_path / "3", image="other")
    (place / "version").write_text("1.0 of an application")
    assert unpacked(place, tmp_path / "4").kind == "directory"


def test_an_image_without_layers_is_empty(tmp_path: Path) -> None:
    """Programs in Go write null for a list of none."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/manifest.json").write_text('[{"Config": "c.json", "RepoTags": null, "Layers": null}]')
    (tmp_path / "saved/c.json").write_text('{"config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": null}}')
    found = unpacked(tmp_path / "saved", tmp_path / "work")
    assert (found.kind, found.config.env, content(found.root)) == ("docker archive", ("A=1",), {})


def test_one_of_several_images_is_chosen(tmp_path: Path) -> None:
    """By name, or by machine where an index has one for each."""
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    (second,) = json.loads((image_layout(tmp_path / "second", LAYERS[:1], RUN) / "index.json").read_text())["manifests"]
    shutil.copytree(tmp_path / "second/blobs", layout / "blobs", dirs_exist_ok=True)
    other = {**second, "annotations": {"org.opencontainers.image.ref.name": "other"}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry, other]}))
    with pytest.raises(UsageError, match="latest, other"):
        unpacked(layout, tmp_path / "1")
    check(unpacked(layout, tmp_path / "2", image="latest"))
    assert content(unpacked(layout, tmp_path / "2b", image=second["digest"]).root).keys() < EXPECTED.keys() | {
        "etc/gone"
    }
    with pytest.raises(NotFound, match="absent"):
        unpacked(layout, tmp_path / "3", image="absent")
    strange = {**entry, "platform": {"architecture": "s390x", "os": "linux"}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [strange, entry]}))
    check(unpacked(layout, tmp_path / "4"))


def test_altered_images_are_refused(tmp_path: Path) -> None:
    """A blob that is not what its digest says, and a layer that is not what the config says."""
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs/sha256" / entry["digest"][7:]).read_text())
    layer = layout / "blobs/sha256" / manifest["layers"][1]["digest"][7:]
    good = layer.read_bytes()
    layer.write_bytes(good + b"\0")
    with pytest.raises(Corrupt, match="altered"):
        unpacked(layout, tmp_path / "1")
    layer.unlink()
    layer.symlink_to("/etc/passwd")
    with pytest.raises(Corrupt, match="outside"):
        unpacked(layout, tmp_path / "2")
    layer.unlink()
    with pytest.raises(NotFound):
        unpacked(layout, tmp_path / "3")
    swapped = image_layout(tmp_path / "swapped", LAYERS, RUN)
    first, second = manifest["layers"]
    body = json.dumps({**manifest, "layers": [second, first]}).encode()
    digest = hashlib.sha256(body).hexdigest()
    (swapped / "blobs/sha256" / digest).write_bytes(body)
    entry["digest"] = f"sha256:{digest}"
    (swapped / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    with pytest.raises(Corrupt, match="config names"):
        unpacked(swapped, tmp_path / "4")


def test_a_package_of_ours_is_no_image(tmp_path: Path) -> None:
    layout = image_layout(tmp_path / "image", LAYERS, RUN)
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs/sha256" / entry["digest"][7:]).read_text())
    manifest["layers"][0]["mediaType"] = "application/vnd.p2pdist.layer.v1.squashfs"
    body = json.dumps(manifest).encode()
    digest = hashlib.sha256(body).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(body)
    entry["digest"] = f"sha256:{digest}"
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    with pytest.raises(UsageError, match="squashfs"):
        unpacked(layout, tmp_path / "work")


def test_an_unpacked_docker_archive_is_one(tmp_path: Path) -> None:
    """A directory is told as a tar of it is, whatever names the layers have; with another
    manifest.json it is a plain one."""
    place = tmp_path / "saved"
    (place / "0").mkdir(parents=True)
    for number, layer in enumerate(LAYERS):
        (place / f"0/layer{number}.tar").write_bytes(layer)
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in LAYERS]
    (place / "config.json").write_text(json.dumps({"config": RUN, "rootfs": {"diff_ids": ids}}))
    layers = [f"0/layer{number}.tar" for number in range(len(LAYERS))]
    (place / "manifest.json").write_text(json.dumps([{"Config": "config.json", "Layers": layers, "RepoTags": ["a:1"]}]))
    before = content(place)
    with tarfile.open(tmp_path / "saved.tar", "w") as archive:
        archive.add(place, ".")
    for source in (place, tmp_path / "saved.tar"):
        found = unpacked(source, tmp_path / f"from {source.name}", image="a:1")
        assert found.kind == "docker archive"
        check(found)
    assert content(place) == before
    (place / "manifest.json").write_text(json.dumps([{"name": "app"}]))
    assert unpacked(place, tmp_path / "plain").kind == "directory"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link"])
def test_a_docker_archive_names_nothing_outside(tmp_path: Path, name: str) -> None:
    saved = json.dumps([{"Config": "config.json", "Layers": [name], "RepoTags": ["a:1"]}])
    config = json.dumps({"config": RUN, "rootfs": {"diff_ids": ["sha256:" + "0" * 64]}})
    (tmp_path / "secret").write_bytes(LAYERS[0])
    archive = tar_of(("manifest.json", saved), ("config.json", config), ("link", ("link", str(tmp_path / "secret"))))
    (tmp_path / "saved.tar").write_bytes(archive)
    with pytest.raises(Corrupt, match="outside"):
        unpacked(tmp_path / "saved.tar", tmp_path / "work")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["fifo", "directory", "a" * 300, "config.json/layer"])
def test_a_docker_archive_whose_layer_is_no_file_is_corrupt(tmp_path: Path, name: str) -> None:
    """It is not waited for: nobody writes to a FIFO of a directory that came from elsewhere."""
    place = tmp_path / "saved"
    (place / "directory").mkdir(parents=True)
    os.mkfifo(place / "fifo")
    (place / "manifest.json").write_text(json.dumps([{"Config": "config.json", "Layers": [name]}]))
    (place / "config.json").write_text(json.dumps({"rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}))
    with pytest.raises(Corrupt, match="is not a regular file"):
        unpacked(place, tmp_path / "work")


@pytest.mark.parametrize("name", ["loop", "loop/config.json", "manifest.json/config.json", "a" * 300])
def test_a_docker_archive_whose_config_cannot_be_is_corrupt(tmp_path: Path, name: str) -> None:
    saved = json.dumps([{"Config": name, "Layers": []}])
    (tmp_path / "saved.tar").write_bytes(tar_of(("manifest.json", saved), ("loop", ("link", "loop"))))
    with pytest.raises(Corrupt, match=name):
        unpacked(tmp_path / "saved.tar", tmp_path / "work")
