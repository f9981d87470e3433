"""--encrypt-to: what is to be encrypted is not pushed in the clear, wherever the option is set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2pdist.cli.main import main
from p2pdist.encryption import new_identity
from p2pdist.model.errors import UsageError

MARK = b"what nobody without the key may see"
VARIABLE = "P2PDIST_ENCRYPT_TO"


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    return int(end.value.code or 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PDIST_LAYOUT", str(tmp_path / "layout"))
    monkeypatch.setenv("P2PDIST_ORIGIN", (tmp_path / "origin").as_uri())
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "origin" / "blobs" / "sha256").mkdir(parents=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(MARK * 3)
    (tmp_path / "caches" / "cuda").mkdir(parents=True)
    (tmp_path / "caches" / "cuda" / "kernel").write_bytes(MARK)
    return tmp_path


def pushed(place: Path) -> list[bytes]:
    return [path.read_bytes() for path in (place / "origin").rglob("*") if path.is_file()]


def pushes(place: Path) -> dict[str, list[str | Path]]:
    source = place / "source"
    return {
        "push": ["push", "team-a/p:v1"],
        "pack": ["pack", source, "-t", "team-a/q:v1", "--format", "tree", "--push"],
        "cache": ["cache", "save", "team-a", "--dir", place / "caches"],
        "blob": ["blob", "push", source / "file", "--no-torrent"],
    }


@pytest.mark.parametrize("verb", ["push", "pack", "cache", "blob"])
@pytest.mark.parametrize("way", ["flag", "variable", "blank"])
def test_an_empty_recipient_is_an_error(place: Path, verb: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("pack", place / "source", "-t", "team-a/p:v1", "--format", "tree") == 0
    words = pushes(place)[verb]
    if way == "variable":
        monkeypatch.setenv(VARIABLE, "")
    else:
        words = [*words, "--encrypt-to", " " if way == "blank" else ""]
    assert run(*words) == UsageError.exit_code
    assert not pushed(place)


@pytest.mark.parametrize("verb", ["push", "pack", "cache", "blob"])
def test_a_recipient_in_the_environment_holds_for_all_that_push(
    place: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("pack", place / "source", "-t", "team-a/p:v1", "--format", "tree") == 0
    monkeypatch.setenv(VARIABLE, f" {new_identity()[1]}\n")
    assert run(*pushes(place)[verb]) == (UsageError.exit_code if verb == "blob" else 0)
    assert not any(MARK in data for data in pushed(place)) and bool(pushed(place)) == (verb != "blob")
    assert run("pack", place / "source", "-t", "team-a/r:v1", "--format", "tree") == 0, "which pushes nothing"


def test_what_is_only_packed_is_not_encrypted(place: Path) -> None:
    words = ["pack", place / "source", "-t", "team-a/p:v1", "--format", "tree", "--encrypt-to", new_identity()[1]]
    assert run(*words) == UsageError.exit_code


def test_without_pyrage_commands_say_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    access, recipient = place / "access" / "access.toml", new_identity()[1]
    access.parent.mkdir(mode=0o700)
    assert run("access", "create", "--access", access) == 0
    assert run("key", "create", "team-a", "--access", access) == 0
    assert run("pack", place / "source", "-t", "team-a/p:v1", "--format", "tree") == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "pyrage", None)
    for words in (
        ["push", "team-a/p:v1", "--encrypt-to", recipient],
        ["key", "create", "team-b", "--access", access],
        ["key", "rotate", "team-a", "--access", access],
        ["key", "list", "--access", access],
        ["key", "rewrap", "team-a", "team-a/p:v1", "--access", access],
    ):
        assert run(*words) == 1
        assert "pip install 'p2pdist[age]'" in capsys.readouterr().err, words
    assert not pushed(place) and len(list(access.parent.glob("sealed-*"))) == 1
