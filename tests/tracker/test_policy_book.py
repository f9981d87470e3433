"""Which policy holds for packages, blobs and leases."""

from __future__ import annotations

import time
import tomllib

import pytest
from fleet_rig import PIECE, Hosts

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Refused
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import Holding
from p2pdist.model.policy import NO_POLICY
from tracker.core.fleet import Fleet
from tracker.core.policy import book as books
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.table import read_table

MANIFEST, OTHER = digest_of(b"manifest"), digest_of(b"other")
FIRST, SECOND, THIRD = (digest_of(each) for each in (b"1", b"2", b"3"))


def book(*policies: str, into: PolicyBook | None = None) -> PolicyBook:
    """A book of policies, each a pattern and lines of TOML."""
    text = "".join(f'[[policy]]\nmatch = "{each.partition(" ")[0]}"\n{each.partition(" ")[2]}\n' for each in policies)
    table, mistakes = read_table(tomllib.loads(text))
    assert mistakes == []
    found = into or PolicyBook()
    found.replace(table)
    return found


def wants(blob: Digest, count: int = 0) -> Holding:
    return Holding(blob, 512 * PIECE, PIECE, (count, count))


def test_a_package_by_digest_goes_by_the_tags_that_lead_to_it() -> None:
    policies = book("app:v* cache = 'pin'")
    by_digest = parse_reference(f"app@{MANIFEST}")
    assert policies.for_agents(by_digest, "") == NO_POLICY
    policies.note(parse_reference("app:v1"), MANIFEST, [FIRST])
    assert policies.for_agents(by_digest, "").cache == "pin"
    assert policies.for_agents(parse_reference("app:v2"), "").cache == "pin", "a pattern needs no acquaintance"
    assert policies.for_agents(parse_reference("other:v1"), "") == NO_POLICY


def test_what_is_known_of_packages_outlives_a_new_table() -> None:
    policies = book()
    reference = parse_reference("app:v1")
    assert not policies.known(reference, MANIFEST)
    policies.note(reference, MANIFEST, [FIRST])
    assert policies.known(reference, MANIFEST)
    assert not policies.known(parse_reference("app:v2"), MANIFEST), "another tag is news"
    assert policies.readers(FIRST) is None
    book("app:v1 readers = 3", into=policies)
    assert policies.readers(FIRST) == ("app:v1", 3)
    book(into=policies)
    assert policies.readers(FIRST) is None


def test_a_zone_is_refused_a_blob_when_all_its_packages_refuse_it() -> None:
    policies = book("near:* zones = ['a']", "far:* zones = ['b']")
    policies.admit("c", wants(FIRST))  # nobody knows of what it is
    policies.note(parse_reference("near:v1"), MANIFEST, [FIRST, SECOND])
    policies.note(parse_reference("far:v1"), OTHER, [SECOND])
    policies.admit("a", wants(FIRST))
    policies.admit("b", wants(SECOND))
    for zone, blob in (("b", FIRST), ("c", SECOND)):
        with pytest.raises(Refused):
            policies.admit(zone, wants(blob))
    policies.admit("c", wants(FIRST, 256))  # it has everything, and may give it
    policies.note(parse_reference("free:v1"), THIRD, [SECOND])
    policies.admit("c", wants(SECOND))


def test_a_site_is_refused_what_is_for_other_sites() -> None:
    """A zone that names no site is one by itself; who does not say a site is not refused one."""
    policies = book("near:* sites = ['east']", "far:* zones = ['z2']")
    policies.note(parse_reference("near:v1"), MANIFEST, [FIRST, SECOND])
    policies.admit("z1", wants(FIRST), "east")
    policies.admit("east", wants(FIRST))
    for zone, site in (("z1", "west"), ("z1", ""), ("", "")):
        with pytest.raises(Refused, match="for hosts at the sites east, and this one is at"):
            policies.admit(zone, wants(FIRST), site)
        with pytest.raises(Refused):
            policies.for_agents(parse_reference("near:v1"), zone, site)
    policies.admit("z1", wants(FIRST, 256), "west")  # it has everything, and may give it
    assert policies.for_agents(parse_reference("near:v1"), "z1").match == "near:*"
    policies.note(parse_reference("far:v1"), OTHER, [SECOND])
    policies.admit("z2", wants(SECOND), "west")
    with pytest.raises(Refused):
        policies.admit("z1", wants(SECOND), "west")


def test_the_name_of_no_site_is_a_mistake() -> None:
    _, mistakes = read_table(tomllib.loads('[[policy]]\nmatch = "a:*"\nsites = ["ea st", 3]'))
    assert len(mistakes) == 1 and "sites" in str(mistakes[0])


def test_of_limits_on_readers_the_first_in_the_file_holds() -> None:
    policies = book("b:* readers = 2", "a:* readers = 1", "c:* cache = 'pin'")
    policies.note(parse_reference("a:v1"), MANIFEST, [FIRST, SECOND])
    policies.note(parse_reference("b:v1"), OTHER, [SECOND])
    policies.note(parse_reference("c:v1"), THIRD, [SECOND, THIRD])
    assert policies.readers(FIRST) == ("a:*", 1)
    assert policies.readers(SECOND) == ("b:*", 2)
    assert policies.readers(THIRD) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MANIFESTS_MAX", "BLOBS_MAX", "NAMES_MAX"):
        monkeypatch.setattr(books, name, 4)
    policies = book("*")
    for number in range(20):
        policies.note(parse_reference(f"app:v{number}"), MANIFEST, [FIRST])
        policies.note(parse_reference("app:v0"), digest_of(bytes([number])), [FIRST, digest_of(bytes([number, 0]))])
        policies.of(parse_reference(f"app:v{number}"))
    tables = (policies._tags, policies._packages, policies._known, policies._found)
    assert all(len(each) <= 4 for each in tables)
    assert all(len(each) <= 4 for each in (*policies._tags.values(), *policies._packages.values()))


def test_a_package_of_which_something_was_forgotten_is_noted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its blobs would go by no policy until the tracker is started again, however often
    somebody asks for it."""
    monkeypatch.setattr(books, "BLOBS_MAX", 4)
    policies = book("app:v1 readers = 3")
    reference = parse_reference("app:v1")
    policies.note(reference, MANIFEST, [FIRST])
    for number in range(4):
        policies.note(parse_reference("other:v1"), OTHER, [digest_of(bytes([number]))])
    assert policies.readers(FIRST) is None and not policies.known(reference, MANIFEST)
    policies.note(reference, MANIFEST, [FIRST])
    assert policies.readers(FIRST) == ("app:v1", 3) and policies.known(reference, MANIFEST)


def test_a_base_of_many_packages_is_refused_to_nobody() -> None:
    """Which of them have it is not remembered in full, so one that a host may have could be among
    them."""
    policies = book("near:* zones = ['a']")
    policies.note(parse_reference("free:v1"), OTHER, [FIRST])
    for number in range(2 * books.NAMES_MAX):
        policies.note(parse_reference(f"near:v{number}"), digest_of(bytes([number])), [FIRST])
        policies.admit("b", wants(FIRST))
    assert not policies.known(parse_reference("free:v1"), OTHER), "it is noted again when somebody asks for it"


# -- at work in the fleet


def fleet(*policies: str) -> Hosts:
    """Hosts in zones a and b, and blobs of a package app:v1."""
    core = Fleet(time.monotonic() - 100.0)
    book(*policies, into=core.policies)
    core.policies.note(parse_reference("app:v1"), MANIFEST, [FIRST, SECOND])
    hosts = Hosts(core)
    hosts.open("a1", "a2", zone="a")
    hosts.open("b1", zone="b")
    return hosts


@pytest.mark.parametrize(("policies", "leases"), [((), 8), (("app:* readers = 3",), 3), (("app:* readers = 1",), 1)])
def test_leases_on_a_policys_blobs_are_limited_together(policies: tuple[str, ...], leases: int) -> None:
    """Two blobs of the package, and one of none, each wanted in two zones: a root in each for
    either stripe unless there is a limit."""
    hosts = fleet(*policies)
    for blob in (FIRST, SECOND, THIRD):
        for host in ("a1", "a2", "b1"):
            hosts.hold(host, blob=blob)
    hosts.pass_time(2.0)
    swarms = hosts.fleet.swarms
    assert sum(swarms[blob].leases() for blob in (FIRST, SECOND)) == leases
    assert swarms[THIRD].leases() == 4, "what is under no policy is not limited"


def test_a_host_elsewhere_is_kept_from_the_swarm() -> None:
    hosts = fleet("app:* zones = ['a']")
    hosts.hold("a1", blob=FIRST)
    hosts.hold("b1", blob=FIRST)
    assert list(hosts.fleet.swarms[FIRST].members) == ["a1"]
    hosts.hold("b1", (256, 256), blob=FIRST)
    assert list(hosts.fleet.swarms[FIRST].members) == ["a1", "b1"]


def test_who_keeps_to_a_rate_is_not_called_slow() -> None:
    assert fleet("app:* upload = '1MB/s'").fleet.policies.limits_rate(FIRST)
    assert not fleet("app:* upload = '1MB/s'").fleet.policies.limits_rate(THIRD)
    assert not fleet("app:* cache = 'pin'").fleet.policies.limits_rate(FIRST)


def test_a_blob_is_called_by_the_tag_that_was_asked_for_last() -> None:
    policies = book()
    assert policies.title(FIRST) == ""
    policies.note(parse_reference(f"team/app@{MANIFEST}"), MANIFEST, [FIRST, SECOND])
    assert policies.title(FIRST) == "team/app", "by its digest alone"
    policies.note(parse_reference("team/app:v1"), MANIFEST, ())
    policies.note(parse_reference("team/app:latest"), MANIFEST, ())
    assert policies.title(FIRST) == policies.title(SECOND) == "team/app:latest"
    policies.note(parse_reference("other/app:v1"), OTHER, [FIRST])
    assert (policies.title(FIRST), policies.title(SECOND)) == ("other/app:v1", "team/app:latest")
    policies.note(parse_reference("third/app:v1"), MANIFEST, ())
    assert policies.title(SECOND) == "team/app:latest", "a tag of another name"
