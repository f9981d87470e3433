"""Namespaces of sealed packages in the access file, and their keys beside it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from p2pdist.encryption import recipient_of
from p2pdist.model.errors import NotFound, UsageError
from tracker.access.directory import AccessDirectory
from tracker.access.file import read_rules

HEAD = 'fleet = "prod"\npublic = ["public/*", "team-p/open"]\n'


def rules(text: str):  # type: ignore[no-untyped-def]
    return read_rules((HEAD + text).encode(), "access.toml")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[sealed."public/*"]\nkey = "k"', "public"),
        ('[sealed."public/x"]\nkey = "k"', "public"),
        ('[sealed."team-p/*"]\nkey = "k"', "public"),
        ('[sealed."*"]\nkey = "k"', "public"),
        ('[sealed."team-a/*"]', "either a key or"),
        ('[sealed."team-a/*"]\nkey = "k"\nidentity-command = ["/x"]', "either a key or"),
        ('[sealed."team-a/*"]\nkey = "../k"', "cannot be the name of a key"),
        ('[sealed."team-a/*"]\nkey = "k"\n[sealed."team-b/*"]\nkey = "k"', "another namespace has the key k"),
        ('[sealed."team-a/*"]\nidentity-command = ["kms"]', "no absolute path"),
        (
            '[sealed."team-a/*"]\nidentity-command = ["/k"]\n[sealed."team-b/*"]\nidentity-command = ["/k"]',
            "another namespace has the same identity-command",
        ),
        ('[sealed."Team A"]\nkey = "k"', "no pattern"),
        ('[sealed."team-a/*"]\nkeys = "k"', "unknown field"),
    ],
)
def test_what_cannot_be_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        rules(text)
    assert what in caught.value.what


def test_the_longest_pattern_that_matches_is_the_namespace() -> None:
    found = rules('[sealed."team-a/*"]\nkey = "a"\n[sealed."team-a/models/*"]\nkey = "m"')
    assert found.namespace("team-a/x") == "team-a/*"
    assert found.namespace("team-a/models/x") == "team-a/models/*"
    with pytest.raises(NotFound) as caught:
        found.namespace("team-b/x")
    assert "p2pdist key create" in caught.value.remedy
    for tables in (["team-a/*", "team-a/x", "*"], ["*", "team-a/x", "team-a/*"]):
        text = "".join(f'[sealed."{pattern}"]\nkey = "k{at}"\n' for at, pattern in enumerate(tables))
        found = read_rules(b'fleet = "prod"\n' + text.encode(), "access.toml")
        assert [found.namespace(f"team-{name}") for name in ("a/x", "a/y", "b/x")] == ["team-a/x", "team-a/*", "*"]


def test_keys_are_files_for_their_owner_alone(tmp_path: Path) -> None:
    directory = AccessDirectory(tmp_path / "access.toml")
    directory.prepare(now=0.0)
    first = directory.new_identity("team-a", now=1e9)
    second = directory.new_identity("team-a", now=1e9)
    other = directory.new_identity("team-a-2", now=1e9)
    identities = directory.identities("team-a")
    assert [recipient_of(identity) for identity in identities] == [second, first], "the newest first"
    assert [recipient_of(identity) for identity in directory.identities("team-a-2")] == [other]
    assert directory.key_names() == ["team-a", "team-a-2"]
    files = list(tmp_path.glob("sealed-*"))
    assert len(files) == 3 and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    with pytest.raises(NotFound, match="there is no key team-b"):
        directory.identities("team-b")
    with pytest.raises(UsageError):
        directory.new_identity("../x", now=1e9)
