"""`p2pdist torrent`: what comes of it is what libtorrent makes of the same content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import libtorrent
import pytest
from test_cli_main import run

from p2pdist.model.digest import digest_of, hex_of


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
