"""`p2pdist torrent`: what comes of it is what libtorrent makes of the same content."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
from pathlib import Path

import libtorrent
import pytest
from formats_rig import torrent_info
from programs import PROGRAM
from registry_rig import needs_registry, running_registry
from test_cli_main import run

from p2pdist.model.bencode import Value, decode
from p2pdist.model.digest import digest_of, hex_of, parse_digest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/weights").write_bytes(os.urandom(5_000_000))
    (tmp_path / "file").write_bytes(os.urandom(300_000))
    return tmp_path


def done(place: Path, *words: str, code: int = 0) -> dict[str, object]:
    variables = {"P2PDIST_LAYOUT": str(place / "layout"), "P2PDIST_ORIGIN": (place / "origin").as_uri()}
    finished = run(*words, "--json", **variables)
    assert finished.returncode == code, finished.stderr
    found: dict[str, object] = json.loads(finished.stdout)
    return found


def test_the_torrent_of_a_blob(place: Path) -> None:
    digest = str(done(place, "blob", "push", str(place / "file"))["digest"])
    made = done(place, "torrent", digest, "-o", str(place / "t"), "--tracker", "http://127.0.0.1:7070/")
    info = libtorrent.torrent_info((place / "t").read_bytes())
    assert info.info_hashes().v1.to_bytes().hex() == made["info_hash_v1"]
    assert info.info_hashes().v2.to_bytes().hex() == made["info_hash_v2"]
    assert [tracker.url for tracker in info.trackers()] == [f"http://127.0.0.1:7070/announce?blob={digest}"]
    assert info.total_size() == 300_000 == made["size"]
    assert info.hash_for_piece(0) == hashlib.sha1((place / "file").read_bytes()[:65536]).digest()


@needs_registry
def test_a_registry_keeps_files_without_torrents_and_names(place: Path) -> None:
    """It tags manifests alone. A file that is pushed gets a torrent by default, and none there."""
    with running_registry(place / "registry") as registry:
        origin = ("--origin", registry.url("team/packages"))
        digest = hashlib.sha256((place / "file").read_bytes()).hexdigest()
        pushed = done(place, "blob", "push", str(place / "file"), *origin)
        assert (pushed["digest"], pushed["torrent"]) == (f"sha256:{digest}", None)
        unnamed = done(place, "blob", "pull", "file", "-o", str(place / "out"), *origin, code=3)
        assert "have no names, so none is called file" in str(unnamed["detail"])
        other = f"sha256:{'0' * 12}"
        missing = done(place, "blob", "pull", other, "-o", str(place / "out"), *origin, code=3)
        assert missing["detail"] == f"no file at the origin is called {other}"
        done(place, "pack", str(place / "source"), "-t", "app:v1")
        before = registry.requests("PUT")
        for words in (("push", "app:v1", "--torrent"), ("blob", "push", str(place / "file"), "--torrent")):
            assert "is a registry, which keeps no torrents" in str(done(place, *words, *origin, code=2)["detail"])
        assert registry.requests("PUT") == before, "and nothing was sent"
        assert "keeps no torrents" in str(done(place, "torrent", f"sha256:{digest}", *origin, code=2)["detail"])


def test_the_torrent_of_a_package_is_its_blobs_in_their_places(place: Path) -> None:
    done(place, "pack", str(place / "source"), "-t", "app:v1", "--format", "tree")
    done(place, "push", "app:v1")
    done(place, "torrent", "app:v1", "-o", str(place / "t"), "--tracker", "http://127.0.0.1:7070")
    files = libtorrent.torrent_info((place / "t").read_bytes()).files()
    listed = [
        (files.file_path(i), files.file_size(i)) for i in range(files.num_files()) if "pad" not in files.file_path(i)
    ]
    assert len(listed) == 3
    for path, size in listed:
        data = (place / "origin/blobs" / path).read_bytes()
        assert (len(data), f"sha256/{hex_of(digest_of(data))}") == (size, path)


def test_what_is_not_there_has_no_torrent(place: Path) -> None:
    done(place, "torrent", "no:v1", code=3)
    done(place, "torrent", "no:v1", "-o", str(place / "t"), code=2)


def torrents_at(place: Path) -> set[str]:
    """The subjects of the torrents at the origin."""
    listed = json.loads((place / "origin/index.json").read_text())["manifests"]
    names = [each.get("annotations", {}).get("org.opencontainers.image.ref.name", "") for each in listed]
    return {name.removeprefix("torrent:sha256-") for name in names if name.startswith("torrent:")}


def document_of(place: Path, digest: object) -> dict[bytes, Value]:
    body = decode((place / "origin/blobs/sha256" / hex_of(parse_digest(digest))).read_bytes())
    assert isinstance(body, dict)
    return body


def test_a_blob_is_pushed_with_its_torrent(place: Path) -> None:
    """It is the one that `p2pdist torrent` makes; a second push makes none."""
    pushed = done(place, "blob", "push", str(place / "file"))
    assert torrents_at(place) == {str(pushed["digest"]).removeprefix("sha256:")}
    assert done(place, "blob", "push", str(place / "file"))["torrent"] == pushed["torrent"]
    assert done(place, "torrent", str(pushed["digest"]))["document"] == pushed["torrent"]


def test_a_blob_is_pushed_without_a_torrent_if_so_wanted(place: Path) -> None:
    assert done(place, "blob", "push", str(place / "file"), "--no-torrent")["torrent"] is None
    assert torrents_at(place) == set()


def test_an_empty_blob_has_no_torrent(place: Path) -> None:
    (place / "empty").touch()
    assert done(place, "blob", "push", str(place / "empty"))["torrent"] is None


@pytest.mark.slow
def test_a_package_is_pushed_with_torrents_of_itself_and_of_its_blobs(place: Path) -> None:
    """A blob that comes again in the next version is not hashed again. The package's torrent is the
    one of `p2pdist torrent`."""
    done(place, "pack", str(place / "source"), "-t", "app:v1", "--format", "tree")
    pushed = done(place, "push", "app:v1", "--torrent")
    made = pushed["torrents"]
    assert isinstance(made, dict)
    assert len(made) == 4, "root, catalog, pack, and all of them"
    assert torrents_at(place) == {hex_of(parse_digest(subject)) for subject in made}
    assert done(place, "torrent", "app:v1")["document"] == made[pushed["digest"]]
    for subject in made.keys() - {pushed["digest"]}:
        (place / "blob").write_bytes((place / "origin/blobs/sha256" / hex_of(parse_digest(subject))).read_bytes())
        body = document_of(place, made[subject])
        assert body == decode(
            torrent_info((place / "blob").open("rb"), (place / "blob").stat().st_size, hex_of(subject))
        )
    assert done(place, "push", "app:v1", "--torrent")["torrents"] == {}
    (place / "source/more").write_bytes(os.urandom(1000))
    done(place, "pack", str(place / "source"), "-t", "app:v2", "--format", "tree")
    again = done(place, "push", "app:v2", "--torrent")["torrents"]
    assert isinstance(again, dict)
    assert not again.keys() & made.keys()


def test_what_a_base_brought_is_read_from_the_origin(place: Path) -> None:
    """The layout has the new version only."""
    done(place, "pack", str(place / "source"), "-t", "app:v1", "--format", "tree")
    done(place, "push", "app:v1")
    for blob in (place / "layout/blobs/sha256").iterdir():
        if blob.stat().st_size > 4_000_000:
            blob.unlink()
    made = done(place, "push", "app:v1", "--torrent")["torrents"]
    assert isinstance(made, dict)
    assert len(made) == 4


@pytest.mark.parametrize(
    "words", ["trace -o none/t.json -- touch ran", "simulate --hosts 2 --size 1MiB --report none/r.json"]
)
def test_a_directory_that_is_not_there_is_told_before_the_work(words: str, place: Path) -> None:
    """The program would have run for nothing."""
    finished = run(*words.replace("none", str(place / "none")).replace("ran", str(place / "ran")).split())
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"there is no directory {place / 'none'}" in finished.stderr and not (place / "ran").exists()


def test_standard_output_keeps_its_file(place: Path) -> None:
    """/dev/stdout may lead to a file that the caller goes on writing to; `-` is no file."""
    digest = str(done(place, "blob", "push", str(place / "file"))["digest"])
    origin = f"--origin {(place / 'origin').as_uri()}"
    words = f"torrent {digest} {origin} --tracker http://tracker:7070 --json"
    script = f"{shlex.join(PROGRAM)} {words} -o /dev/stdout; echo behind"
    with (place / "out").open("wb") as out:
        subprocess.run(["sh", "-c", script], stdout=out, check=True)
    written = (place / "out").read_bytes()
    assert written.startswith(b"d8:announce") and written.endswith(b"behind\n")
    finished = run(*words.split(), "-o", "-")
    assert finished.returncode == 2 and "Name a file; - is one as ./-" in finished.stderr
