"""Repositories of hubs: their names, and which commits may become a directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from p2pdist.model.errors import Corrupt, Refused, UsageError
from p2pdist.model.hub import (
    HubFile,
    HubListing,
    check_listing,
    check_token,
    git_oid,
    hub_name,
    hub_url,
    parse_hub,
)

NAME, COMMIT, OID = hub_name("models", "org/name"), "a" * 40, "b" * 40


@pytest.mark.parametrize(
    "text, full, package",
    [
        ("hf://org/name", "hf://org/name@main", "hf.co/org/name:main"),
        ("hf://gpt2@v1", "hf://gpt2@v1", "hf.co/gpt2:v1"),
        ("hf://datasets/org/name@refs/pr/1", "hf://datasets/org/name@refs/pr/1", "hf.co/datasets/org/name:refs/pr/1"),
        (
            f"hf://spaces/Org/Name_1.x@{COMMIT}",
            f"hf://spaces/Org/Name_1.x@{COMMIT}",
            f"hf.co/spaces/Org/Name_1.x:{COMMIT}",
        ),
    ],
)
def test_a_reference_is_read(text: str, full: str, package: str) -> None:
    found = parse_hub(text)
    assert (str(found), str(found.package)) == (full, package)


@pytest.mark.parametrize(
    "text", ["hf://", "hf://a/b/c", "hf://../b", "hf://a/..", "hf://a b", "hf://a@", "hf://a@-x", "hf://a@x..y"]
)
def test_a_reference_that_names_nothing_is_refused(text: str) -> None:
    if text == "hf://a@":
        assert parse_hub(text).revision == "main"
        return
    with pytest.raises(UsageError):
        parse_hub(text)


@pytest.mark.parametrize(
    "path", ["../x", "a/../b", "/a", "a//b", "a/", "", ".", "a\nb", "a\x1bb", "a\\b", "a\u202eb", "a\udcff", "x" * 256]
)
def test_a_commit_with_a_name_that_leads_elsewhere_is_refused_whole(path: str) -> None:
    files = (HubFile("good.json", 1, OID), HubFile(path, 1, OID))
    with pytest.raises(Refused):
        check_listing(NAME, HubListing(COMMIT, files))


def test_a_listing_that_contradicts_itself_is_corrupt() -> None:
    good = HubFile("a", 1, OID)
    check_listing(NAME, HubListing(COMMIT, (good, HubFile("b ü 文", 2, OID, "c" * 64))))
    for files in ((good, good), (HubFile("a", 1, "x"),), (HubFile("a", 1, OID, "c" * 63),)):
        with pytest.raises(Corrupt):
            check_listing(NAME, HubListing(COMMIT, files))
    with pytest.raises(Corrupt):
        check_listing(NAME, HubListing("main", ()))


def test_an_object_id_is_that_of_git(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some bytes\n")
    found = subprocess.run(["git", "hash-object", "file"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert git_oid(b"some bytes\n") == found.stdout.strip()


def test_addresses_and_tokens_are_checked() -> None:
    assert hub_url("huggingface.co") == "https://huggingface.co"
    assert hub_url("127.0.0.1:80/") == "http://127.0.0.1:80"
    for text in ("", "ftp://a", "https://user:secret@a", "https://a?x"):
        with pytest.raises(UsageError) as failed:
            hub_url(text)
        assert "secret" not in str(failed.value)
    assert check_token("hf_abc") == "hf_abc"
    with pytest.raises(UsageError) as failed:
        check_token("hf abc")
    assert "abc" not in str(failed.value)
