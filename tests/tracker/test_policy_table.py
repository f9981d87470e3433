"""Policies as they are written: what each key means, which policy holds, and how every mistake is
named."""

from __future__ import annotations

import tomllib

import pytest

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Refused, UsageError
from p2pdist.model.image import parse_image
from p2pdist.model.manifest import parse_reference
from p2pdist.model.policy import NO_POLICY, PackagePolicy, decode_policy, encode_policy
from tracker.core.policy.rules import Zones
from tracker.core.policy.section import MISTAKES_MAX, Mistake
from tracker.core.policy.table import PolicyTable, names_of, parse_pattern, read_table

EXAMPLE = """
[[policy]]
match = "team/trainer:prod"
priority = "start"
transport = "trees"
cache = "pin"
readers = 8
zones = ["eu-1", "eu-2"]
[policy.warm]
selector = "zone=eu-1"
count = 10
every = "30s"

[[policy]]
match = "datasets/*"
priority = "preseed"
upload = "100MB/s"
download = "2Gbit/s"
ttl = "2h"
lazy = true

[[policy]]
match = "*"
cache = "none"
"""


def table(text: str) -> PolicyTable:
    found, mistakes = read_table(tomllib.loads(text))
    assert mistakes == []
    return found


def mistakes(text: str) -> list[Mistake]:
    return read_table(tomllib.loads(text))[1]


def test_every_key_says_what_it_says() -> None:
    prod, data, rest = table(EXAMPLE).policies
    assert prod.for_agents() == PackagePolicy("team/trainer:prod", "start", transport="trees", cache="pin")
    assert (prod.readers.readers, prod.zones.zones) == (8, ("eu-1", "eu-2"))
    warm = prod.warm
    assert (warm.tags, warm.selector, warm.count, warm.every_s) == (("team/trainer:prod",), "zone=eu-1", 10, 30.0)
    assert data.for_agents() == PackagePolicy("datasets/*", "preseed", 1e8, 2.5e8, None, "ttl", 7200.0, True)
    assert rest.for_agents() == PackagePolicy("*", cache="none")
    assert rest.readers.readers is None and rest.zones.zones == () and rest.warm.tags == ()


def test_the_first_that_matches_holds_alone() -> None:
    policies = table(EXAMPLE)

    def match(*names: str) -> str:
        found = policies.find(names)
        assert found is not None
        return found.match

    assert match("team/trainer:prod") == "team/trainer:prod"
    assert match("team/trainer:v3") == "*"
    assert match("datasets/a/b:v1") == "datasets/*"
    assert match("datasets/x:1", "team/trainer:prod") == "team/trainer:prod", "the file's order counts, not the names'"
    assert table("").find(["a:b"]) is None


def test_a_reference_by_digest_matches_the_patterns_of_all_tags() -> None:
    digest = digest_of(b"")
    assert names_of(parse_reference("a/b:v1")) == ("a/b:v1",)
    by_digest = names_of(parse_reference(f"a/b@{digest}"))
    assert table('[[policy]]\nmatch = "a/b:*"\n').find(by_digest) is not None
    assert table('[[policy]]\nmatch = "a/b:v*"\n').find(by_digest) is None
    assert table(f'[[policy]]\nmatch = "a/b@{digest}"\n').find(by_digest) is not None


def test_images_are_packages_of_their_registry_and_repository() -> None:
    for text in ("docker.io/library/debian:12", "127.0.0.1:5000/team/app:v1", "registry.example:5000/team/*"):
        assert parse_pattern(text) == text
    image = parse_image("docker://127.0.0.1:5000/team/app:v1").package
    assert table('[[policy]]\nmatch = "127.0.0.1:5000/team/app:v1"\n').find(names_of(image)) is not None
    assert table('[[policy]]\nmatch = "127.0.0.1:5000/team/app:v2"\n').find(names_of(image)) is None
    for wrong in ("127.0.0.1:5000/team/app", "127.0.0.1:5000/Team/app:v1", "127.0.0.1:port/team/app:v1"):
        with pytest.raises(UsageError):
            parse_pattern(wrong)


@pytest.mark.parametrize("text", ["trainer", "a b:*", "", "Trainer:v1", "trainer:", "ä:*", "x" * 256 + "*"])
def test_what_no_reference_could_match_is_no_pattern(text: str) -> None:
    with pytest.raises(UsageError):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("line", "key", "what", "remedy"),
    [
        ("lazy = 'yes'", "lazy", "neither true nor false", "Write one of them"),
        ("priorty = 'start'", "priorty", "no such key", "Write priority"),
        ("speed = 1", "speed", "no such key", "keys are match"),
        ("priority = 'high'", "priority", "'high' is none of them", "start, preseed"),
        ("priority = 1", "priority", "1 is not a text", "start, preseed"),
        ("upload = 100", "upload", "100 is not a text", "200MB/s"),
        ("download = 'fast'", "download", "'fast' is no rate", "300MB/s"),
        ("download = '10000TB/s'", "download", "no host is so fast", "no limit"),
        ("upload = '9e300MB/s'", "upload", "no host is so fast", "no limit"),
        ("transport = 'tree'", "transport", "'tree' is none of them", "trees, swarm, auto"),
        ("cache = 'ttl'", "cache", "for how long", 'ttl = "2h"'),
        ("cache = 'pin'\nttl = '1h'", "ttl", "contradicts", "Remove one"),
        ("ttl = '2 hours'", "ttl", "not a time", "90s"),
        ("ttl = '9999d'", "ttl", "ten years", "pin"),
        ("readers = 0", "readers", "not a whole number from 1", "such a number"),
        ("readers = true", "readers", "not a whole number", "such a number"),
        pytest.param(f"readers = 0x{'f' * 5000}", "readers", "not a whole number", "such a number", id="digits"),
        pytest.param(f"priority = [0x{'f' * 5000}]", "priority", "is not a text", "start", id="digits-in-a-list"),
        ("zones = 'a'", "zones", "not a list", "Write a list"),
        ("zones = ['a', 'a']", "zones", "twice", "Name each once"),
        ("zones = ['a b']", "zones", "no zone", "--zone"),
        ("warm = 3", "warm", "not a table", "[policy.warm]"),
        ("transport = 'swarm'\nupload = '1MB/s'", "upload", "keeps no rate", "trees"),
    ],
)
def test_each_mistake_names_table_key_and_remedy(line: str, key: str, what: str, remedy: str) -> None:
    (found,) = mistakes(f'[[policy]]\nmatch = "a:*"\n\n[[policy]]\nmatch = "b:*"\n{line}\n')
    assert (found.table, found.key) == ("[[policy]] 2 (b:*)", key)
    assert what in found.what and remedy in found.remedy
    assert str(found) == f"{found.table}, {key}: {found.what}. {found.remedy}"


@pytest.mark.parametrize(
    ("lines", "key", "what"),
    [
        ("", "count", "on which hosts"),
        ("count = 0", "count", "from 1 to"),
        ("count = 1\nselector = 'floor=2'", "selector", "selects nothing"),
        ("count = 1\nevery = '10ms'", "every", "not a time"),
        ("count = 1\nevery = '0.5s'", "every", "not from 1 s"),
        ("count = 1\nhosts = 2", "hosts", "no such key"),
        ("count = 1\ntags = ['b:v1']", "warm.tags", "does not match b:v1"),
        ("count = 1\ntags = ['a']", "tags", "is no tag"),
        ("count = 1\ntags = ['A:v1']", "tags", "not a reference"),
    ],
)
def test_mistakes_in_what_is_kept_warm(lines: str, key: str, what: str) -> None:
    found = mistakes(f'[[policy]]\nmatch = "a:v1"\n[policy.warm]\n{lines}\n')
    assert any(each.key == key and what in each.what for each in found), found


def test_mistakes_in_the_file_as_a_whole() -> None:
    assert [each.key for each in mistakes("policy = 3")] == ["policy"]
    assert [each.key for each in mistakes("[policies]")] == ["policies"]
    assert "policy 'a:*' before it" in mistakes('[[policy]]\nmatch="a:*"\n' * 2)[0].what
    assert "policy '*' before it" in mistakes('[[policy]]\nmatch="*"\n[[policy]]\nmatch="b:*"\n')[0].what
    assert [each.key for each in mistakes("[[policy]]\ncache = 'lru'\n")] == ["match"]
    tags = '[[policy]]\nmatch="a:*"\n[policy.warm]\ncount=1\n'
    assert "it does not say which" in mistakes(tags)[0].what
    many = "\n".join(f"x{number} = 1" for number in range(500))
    assert len(mistakes(f'[[policy]]\nmatch="a:*"\n{many}')) == MISTAKES_MAX


def test_zones() -> None:
    zones = Zones(("a", "b"))
    zones.check("a", "x:1", "x:*")
    for zone, named in (("c", "zone c"), ("", "no zone")):
        with pytest.raises(Refused, match=f"x:1 is for hosts in a, b, and this one stands in {named}"):
            zones.check(zone, "x:1", "x:*")
    Zones().check("", "x:1", "x:*")


def test_what_agents_are_told_is_one_line_of_ascii_and_comes_back_as_it_was() -> None:
    for policy in table(EXAMPLE).policies:
        text = encode_policy(policy.for_agents())
        assert text.isascii() and "\n" not in text
        assert decode_policy(text) == policy.for_agents()
    assert encode_policy(NO_POLICY) == "{}"
