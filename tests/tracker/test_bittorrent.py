"""Who is told of whom: the rules of the announce core as scripts, then as properties over random
announces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import NotFound, TooLarge, UsageError
from p2pdist.model.messages import PROTOCOL_VERSION, Hello, Holding, Left, decode_from_agent
from tracker.core.bittorrent import announce as core
from tracker.core.bittorrent.addresses import packed_ip
from tracker.core.bittorrent.announce import STOPPED_S, Announce, AnnounceAnswer, Announces, Contact
from tracker.core.bittorrent.peers import Peer, PeerSet, TorrentSwarm
from tracker.core.events import Received, SessionClosed, SessionOpened, Tick
from tracker.core.fleet import Fleet

V1, V2, OTHER = b"1" * 20, b"2" * 20, b"3" * 20
BLOB, SECOND = digest_of(b"blob"), digest_of(b"second")
PIECE = 64 << 10


class Site:
    """A fleet and its announces, at a time that the test sets."""

    def __init__(self) -> None:
        self.fleet = Fleet(started_at=-100.0)
        self.announces = Announces(self.fleet.hosts, self.fleet.swarms)
        self.announces.register((V1, V2), (BLOB,))
        self.now = 0.0
        self._session = 0

    def announce(self, name: str, ip: str = "", **said: Any) -> AnnounceAnswer:
        """The peer `name` announces itself from `ip`, by default an address of its own; it lacks
        something."""
        packed = packed_ip(f"{ip or address(name)}:1")  # for IPv6 as well: the port is what follows the last colon
        assert packed is not None
        chance = said.pop("chance", 0)
        event = Announce(V1, peer_id(name), packed, 6881, left=1)
        return self.announces.announce(replace(event, **said), now=self.now, chance=chance)

    def agent(self, name: str, counts: tuple[int, ...] = (), *, blob: Digest = BLOB, at: str = "", **hello: Any) -> int:
        """An agent of ours, which holds so many pieces of the blob (of one piece)."""
        self._session += 1
        opened = Hello(PROTOCOL_VERSION, name, at or f"{address(name)}:7071", **hello)
        self.fleet.handle(SessionOpened(self._session, opened), now=self.now)
        if counts:
            self.fleet.handle(Received(self._session, Holding(blob, PIECE, PIECE, counts)), now=self.now)
        self.now += core.SYNC_S  # so that the next announce looks at the fleet anew
        return self._session


@pytest.fixture
def site() -> Site:
    return Site()


def peer_id(name: str) -> bytes:
    return name.encode().ljust(20, b".")


def address(name: str) -> str:
    """h7 is at 10.0.0.7."""
    number = int("".join(filter(str.isdigit, name)) or 0)
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def names(answer: AnnounceAnswer) -> list[str]:
    return [contact.peer_id.decode().rstrip(".") for contact in answer.peers]


def addresses(answer: AnnounceAnswer) -> set[tuple[bytes, int]]:
    return {(contact.ip, contact.port) for contact in answer.peers}


def test_the_second_peer_is_told_of_the_first(site: Site) -> None:
    first = site.announce("h1", event="started")
    assert first == AnnounceAnswer(30, 30, 0, 1)
    second = site.announce("h2", event="started")
    assert second == AnnounceAnswer(30, 30, 0, 2, (Contact(peer_id("h1"), bytes([10, 0, 0, 1]), 6881),))
    assert names(site.announce("h1")) == ["h2"], "and the first of the second when it asks again"


def hybrid(site: Site, name: str, **said: Any) -> list[AnnounceAnswer]:
    """A client of both versions announces itself under both info hashes."""
    return [site.announce(name, info_hash=info_hash, **said) for info_hash in (V1, V2)]


def test_a_client_of_both_versions_is_one_peer_under_both_info_hashes(site: Site) -> None:
    hybrid(site, "h1")
    assert [names(answer) for answer in hybrid(site, "h2")] == [["h1"], ["h1"]]
    assert site.announces.peers == 2
    scraped = site.announces.scrape([V1, V2, OTHER], now=0.0)
    assert [(each.info_hash, each.incomplete) for each in scraped] == [(V1, 2), (V2, 2)]
    site.announce("h1", info_hash=V2, event="stopped")
    assert [answer.incomplete for answer in hybrid(site, "h2")] == [1, 1], "one goodbye is enough"


def test_what_was_on_its_way_at_a_goodbye_makes_no_peer(site: Site) -> None:
    """A client of both versions that ends as its download does: one goodbye overtakes what it said
    by the other hash."""
    hybrid(site, "h1", event="started")
    site.announce("h1", left=0, event="completed")
    site.announce("h1", left=0, event="stopped")
    answer = site.announce("h1", left=0, event="completed", info_hash=V2)
    assert (answer.complete, answer.incomplete, answer.peers, site.announces.peers) == (0, 0, (), 0)
    hybrid(site, "h1", left=0, event="started")
    assert site.announces.peers == 1, "it begins again"
    hybrid(site, "h1", left=0, event="stopped")
    site.now += STOPPED_S
    hybrid(site, "h1", left=0)
    assert site.announces.peers == 1, "nothing is on its way for so long"


def test_few_of_those_that_stopped_are_remembered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.core.bittorrent.announce.STOPPED_MAX", 2)
    for name in ("h1", "h2", "h3", "h1"):
        site.announce(name, event="stopped")
    for name in ("h1", "h2", "h3"):
        site.announce(name)
    assert site.announces.peers == 1


def test_clients_of_one_version_are_not_told_of_those_of_the_other(site: Site) -> None:
    """They would greet each other with a hash that the other does not know."""
    site.announce("one1", info_hash=V1, left=0)
    site.announce("two2", info_hash=V2, left=0)
    hybrid(site, "both3", left=0)
    for info_hash, told in ((V1, {"one1", "both3"}), (V2, {"two2", "both3"})):
        answer = site.announce("h9", info_hash=info_hash, key=info_hash)
        assert {*names(answer)} == told and (answer.complete, answer.incomplete) == (2, 1)
    assert {*names(hybrid(site, "h10")[0])} == {"one1", "both3"}
    assert site.announces.scrape([V2], now=0.0)[0].complete == 2


def test_who_is_no_longer_heard_of_under_one_info_hash_is_forgotten_there(site: Site) -> None:
    """Such as a client of both versions that was started again with the torrent of one."""
    hybrid(site, "h1")
    for _ in range(5):
        site.now += 30
        site.announce("h1", info_hash=V2)
    assert names(site.announce("h2", info_hash=V1)) == []
    assert names(site.announce("h2", info_hash=V2)) == ["h1"]


def test_an_agent_of_ours_answers_to_both_info_hashes(site: Site) -> None:
    site.agent("h1", (1,), bt_port=6999)
    assert [answer.complete for answer in hybrid(site, "h9")] == [1, 1]
    assert all(addresses(answer) == {(bytes([10, 0, 0, 1]), 6999)} for answer in hybrid(site, "h9"))


def test_what_was_not_registered_is_not_tracked(site: Site) -> None:
    with pytest.raises(NotFound, match="info hash") as caught:
        site.announce("h1", info_hash=OTHER)
    assert "/torrent" in caught.value.remedy and OTHER not in site.announces
    site.announces.register((OTHER,))
    site.announces.register((OTHER,))
    assert site.announce("h1", info_hash=OTHER).incomplete == 1 and len(site.announces) == 2


def test_a_peer_that_stops_is_forgotten_and_told_of_nobody(site: Site) -> None:
    site.announce("h1")
    site.announce("h2")
    assert site.announce("h1", event="stopped") == AnnounceAnswer(30, 30, 0, 1)
    assert site.announce("h1", event="stopped").incomplete == 1, "twice does not hurt"
    assert site.announce("h3").peers == (Contact(peer_id("h2"), bytes([10, 0, 0, 2]), 6881),)


def test_a_download_that_ends_is_counted_once(site: Site) -> None:
    site.announce("h1")
    assert site.announce("h1", left=0, event="completed").complete == 1
    site.announce("h1", left=0, event="completed", info_hash=V2)
    site.announce("h2", left=0, event="completed")  # nobody saw it download
    assert site.announces.scrape([V1], now=0.0)[0].downloaded == 1


def test_a_peer_expires_after_two_intervals(site: Site) -> None:
    site.announce("h1")
    site.now = 60.0
    site.announce("h2")
    site.now = 89.0
    assert site.announces.scrape([V1], now=site.now)[0].incomplete == 2
    site.now = 91.0
    assert site.announce("h3").incomplete == 2 and site.announces.peers == 2
    site.now = 1000.0
    site.announces.expire(now=site.now)
    assert site.announces.peers == 0 and not site.announces._networks and not site.announces._expiry


def test_a_peer_that_announces_itself_again_does_not_expire(site: Site) -> None:
    for _ in range(50):
        site.announce("h1")
        site.now += 30
    assert site.announce("h2").incomplete == 2 and len(site.announces._expiry) < 60


def test_peers_that_come_and_go_leave_nothing(site: Site) -> None:
    for _ in range(3000):
        site.announce("h1", event="started")
        site.announce("h1", event="stopped")
    assert len(site.announces._expiry) <= 1100


# -- who is told of whom


def test_the_nearest_come_first(site: Site) -> None:
    site.announce("far1")
    site.announce("zone2", zone="a", rack="r2")
    site.announce("rack3", zone="a", rack="r1")
    site.announce("elsewhere4", zone="b", rack="r1")
    answer = names(site.announce("h5", zone="a", rack="r1"))
    assert answer[:2] == ["rack3", "zone2"] and set(answer[2:]) == {"far1", "elsewhere4"}
    assert names(site.announce("h5", zone="a", rack="r1", numwant=1)) == ["rack3"]


def test_racks_without_a_name_are_no_rack(site: Site) -> None:
    """Two hosts of which nothing is known do not stand together, nor two in one zone without
    racks."""
    site.announce("h1")
    site.announce("h2", zone="a", left=0)
    site.announce("h3", zone="b")
    assert names(site.announce("h4", numwant=1)) == ["h2"], "the seed, though nothing is known of where h1 is, either"
    assert names(site.announce("h5", zone="b", numwant=1)) == ["h3"]


def test_whoever_lacks_something_is_told_of_seeds_first(site: Site) -> None:
    for number in range(5):
        site.announce(f"leech{number}")
    site.announce("seed9", left=0)
    assert names(site.announce("h10", numwant=1)) == ["seed9"]


def test_seeds_are_not_told_of_seeds(site: Site) -> None:
    site.announce("seed1", left=0)
    site.announce("leech2")
    answer = site.announce("seed3", left=0)
    assert names(answer) == ["leech2"] and answer.complete == 2
    assert set(names(site.announce("leech2"))) == {"seed1", "seed3"}


def test_those_who_were_handed_out_least_come_first(site: Site) -> None:
    for number in range(1, 5):
        site.announce(f"seed{number}", left=0)
    told = [names(site.announce(f"h{number}", numwant=2, chance=number)) for number in range(10, 16)]
    counts = {name: sum(name in answer for answer in told) for name in ("seed1", "seed2", "seed3", "seed4")}
    assert set(counts.values()) == {3}, counts


def test_chance_alone_decides_among_equals(site: Site) -> None:
    def fresh(chance: int) -> list[str]:
        other = Site()
        for number in range(300):
            other.announce(f"h{number}", numwant=0)
        return names(other.announce("h999", numwant=10, chance=chance))

    assert fresh(12345) == fresh(12345) != fresh(54321)
    assert len(set(fresh(12345))) == 10


def test_a_rack_does_not_become_an_island(site: Site) -> None:
    """One in eight of an answer is of another rack, and one of another zone, as long as there are
    such peers."""
    for number in range(100):
        site.announce(f"rack{number}", zone="a", rack="r1", numwant=0)
        site.announce(f"zone{number + 200}", zone="a", rack="r2", numwant=0)
        site.announce(f"far{number + 400}", zone="b", rack="r1", numwant=0)
    answer = names(site.announce("h999", zone="a", rack="r1", numwant=40))
    kinds = [name.rstrip("0123456789") for name in answer]
    assert kinds[:30] == ["rack"] * 30 and kinds[30:35] == ["zone"] * 5 and len(answer) == 40
    alone = Site()
    for number in range(100):
        alone.announce(f"rack{number}", zone="a", rack="r1", numwant=0)
    assert len(alone.announce("h999", zone="a", rack="r1", numwant=40).peers) == 40, "no place stays empty"


def test_what_is_asked_for_is_limited(site: Site) -> None:
    for number in range(300):
        site.announce(f"h{number}", numwant=0)
    for numwant, count in ((None, 50), (0, 0), (7, 7), (200, 200), (10_000, 200)):
        assert len(set(names(site.announce("h999", numwant=numwant)))) == count


# -- addresses and identity


def test_a_peer_with_two_addresses_is_one_peer(site: Site) -> None:
    """BEP 7: it announces itself over both, and each is told the address of the own family where
    there is one."""
    site.announce("h1", key=b"k")
    assert site.announce("h1", ip="fd00::1", key=b"k").incomplete == 1
    four, six = site.announce("h2"), site.announce("h3", ip="fd00::3")
    assert [len(contact.ip) for contact in four.peers] == [4]
    assert {contact.peer_id: len(contact.ip) for contact in six.peers} == {peer_id("h1"): 16, peer_id("h2"): 4}
    assert names(site.announce("h4", ip="fd00::4", numwant=2, chance=5)) in (["h1", "h3"], ["h3", "h1"]), (
        "reachable first"
    )


def test_a_peer_that_moves_shows_its_key(site: Site) -> None:
    site.announce("h1", key=b"secret")
    assert site.announce("h1", ip="10.9.9.9", key=b"secret").incomplete == 1
    assert addresses(site.announce("h2")) == {(bytes([10, 9, 9, 9]), 6881)}


@pytest.mark.parametrize("key", [b"", b"guess"])
def test_nobody_speaks_for_another(site: Site, key: bytes) -> None:
    """The ids of peers are known to all; with one alone nobody is moved or stopped."""
    site.announce("h1", key=b"secret")
    site.announce("h2")
    for name in ("h1", "h2"):
        site.announce(name, ip="10.6.6.6", key=key, event="stopped")
        site.announce(name, ip="10.6.6.6", key=key)
    assert {(bytes([10, 0, 0, 1]), 6881), (bytes([10, 0, 0, 2]), 6881)} <= addresses(site.announce("h3"))


def test_a_client_that_was_started_again_takes_the_place_of_the_old_one(site: Site) -> None:
    site.announce("h1", key=b"a")
    assert site.announce("again", ip=address("h1"), key=b"b").incomplete == 1
    assert names(site.announce("h2")) == ["again"]


def test_another_port_is_another_peer_at_the_same_address(site: Site) -> None:
    site.announce("h1")
    assert site.announce("other", ip=address("h1"), port=6882).incomplete == 2
    site.announce("h1", port=7000)
    assert {port for _, port in addresses(site.announce("h2"))} == {7000, 6882}


# -- limits


def test_an_address_has_a_limited_number_of_peers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "NETWORK_TORRENT_PEERS_MAX", 3)
    for port in (1, 2, 3):
        site.announce(f"p{port}", ip="10.1.1.1", port=port)
        site.announce(f"q{port}", ip=f"fd00::{port}", port=port)
    for ip in ("10.1.1.1", "fd00::4"):  # of IPv6 a whole /64 is one address
        with pytest.raises(TooLarge, match="address"):
            site.announce("one more", ip=ip, port=4)
    assert site.announce("p1", ip="10.1.1.1", port=1).incomplete == 6, "who is here already may stay"
    site.announce("p1", ip="10.1.1.1", port=1, event="stopped")
    site.announce("one more", ip="10.1.1.1", port=4)
    monkeypatch.setattr(core, "NETWORK_PEERS_MAX", 3)
    site.announces.register((OTHER,))
    with pytest.raises(TooLarge, match="address"):
        site.announce("elsewhere", ip="10.1.1.1", info_hash=OTHER)


def test_who_finds_no_room_is_told_of_others_and_warned(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "TORRENT_PEERS_MAX", 2)
    site.announce("h1")
    site.announce("h2")
    answer = site.announce("h3")
    assert set(names(answer)) == {"h1", "h2"} and "too many" in answer.warning and answer.incomplete == 2
    assert names(site.announce("h1")) == ["h2"] and not site.announce("h1").warning
    monkeypatch.setattr(core, "PEERS_MAX", 2)
    site.announces.register((OTHER,))
    assert site.announce("h3", info_hash=OTHER).warning


def test_torrents_without_peers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    monkeypatch.setattr(core, "TORRENTS_MAX", 2)
    site.announces.register((OTHER,))
    site.announce("h1")
    site.announces.register((b"4" * 20,))
    assert V1 in site.announces and OTHER not in site.announces, "the one without peers, though it is younger"
    site.announce("h1", info_hash=b"4" * 20)
    with pytest.raises(TooLarge, match="torrents"):
        site.announces.register((b"5" * 20,))
    assert len(site.announces) == 2


def test_the_interval_follows_the_number_of_peers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "ANNOUNCES_PER_S", 2)
    seen = {}
    for number in range(1, 4001):
        answer = site.announce(f"h{number}", numwant=0)
        seen[number] = (answer.interval_s, answer.min_interval_s)
    assert seen[1] == (30, 30) and seen[60] == (30, 30) and seen[200] == (100, 50) and seen[4000] == (1800, 900)
    site.now = 119.0  # those who came first were told 30 s, those who came last half an hour
    assert site.announces.scrape([V1], now=site.now)[0].incomplete < 4000
    assert site.announces.interval_s() > 1000


# -- our own agents


def test_an_agent_with_a_port_is_a_peer_of_what_it_holds(site: Site) -> None:
    seed = site.agent("h1", (1,), bt_port=6999, zone="a")
    site.agent("h2", (0,), bt_port=6999)
    site.agent("h3", (1,))  # without a port
    answer = site.announce("h9")
    assert answer.complete == 1 and answer.incomplete == 2
    assert answer.peers[0] == Contact(b"", bytes([10, 0, 0, 1]), 6999), "its peer id is not known"
    assert addresses(answer) == {(bytes([10, 0, 0, 1]), 6999), (bytes([10, 0, 0, 2]), 6999)}
    site.fleet.handle(Received(seed, Left(BLOB)), now=site.now)
    site.now += core.SYNC_S
    assert addresses(site.announce("h9")) == {(bytes([10, 0, 0, 2]), 6999)}


def test_agents_come_in_some_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "ADDED_AT_ONCE", 3)
    for number in range(7):
        site.agent(f"h{number}", (1,), bt_port=6999)
    counts = []
    for _ in range(4):
        counts.append(site.announce("h9").complete)
        site.now += core.SYNC_S
    assert counts == [3, 6, 7, 7]


def test_of_a_very_large_fleet_not_all_are_looked_at(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MEMBERS_LOOK_MAX", 3)
    for number in range(7):
        site.agent(f"h{number}", (1,), bt_port=6999)
    site.announce("h9")
    site.now += core.SYNC_S
    assert site.announce("h9").complete == 3


def test_an_agent_that_moves_is_found_where_it_is(site: Site) -> None:
    site.agent("h1", (1,), bt_port=6999)
    assert addresses(site.announce("h9")) == {(bytes([10, 0, 0, 1]), 6999)}
    site.agent("h1", (1,), bt_port=7999, at="10.0.0.77:7071")
    assert addresses(site.announce("h9")) == {(bytes([10, 0, 0, 77]), 7999)}


def test_an_agent_that_is_away_is_no_peer(site: Site) -> None:
    session = site.agent("h1", (1,), bt_port=6999)
    assert site.announce("h9").complete == 1
    site.fleet.handle(SessionClosed(session), now=site.now)
    site.now += core.SYNC_S
    assert site.announce("h9").complete == 0
    site.now += 10
    site.fleet.handle(Tick(), now=site.now)
    assert not site.fleet.swarms and site.announce("h9").complete == 0


def test_an_agent_that_announces_itself_counts_once(site: Site) -> None:
    site.agent("h1", (0,), bt_port=6999)
    assert site.announce("h9").incomplete == 2
    answer = site.announce("h1", port=6999, left=0)
    assert (answer.complete, answer.incomplete) == (1, 1) and names(answer) == ["h9"]
    site.now += core.SYNC_S
    assert site.announce("h9").complete == 1 and names(site.announce("h9")) == ["h1"]
    site.announce("h1", port=6999, event="stopped")
    site.now += core.SYNC_S
    assert site.announce("h9").incomplete == 2, "what the fleet knows holds again"


def test_an_agent_that_has_everything_now_is_a_seed(site: Site) -> None:
    session = site.agent("h1", (0,), bt_port=6999)
    assert site.announce("h9").complete == 0
    site.fleet.handle(Received(session, Holding(BLOB, PIECE, PIECE, (1,))), now=site.now)
    site.now += core.SYNC_S
    assert site.announce("h9").complete == 1


def test_of_a_package_an_agent_must_hold_every_blob(site: Site) -> None:
    site.announces.register((OTHER,), (BLOB, SECOND))
    site.agent("h1", (1,), bt_port=6999)
    assert site.announce("h9", info_hash=OTHER).complete == 0
    session = site.agent("h2", (1,), bt_port=6999)
    site.fleet.handle(Received(session, Holding(SECOND, PIECE, PIECE, (1,))), now=site.now)
    site.now += core.SYNC_S
    assert addresses(site.announce("h9", info_hash=OTHER)) == {(bytes([10, 0, 0, 2]), 6999)}


def test_an_agent_that_gives_a_name_for_its_address_cannot_be_named_to_others(site: Site) -> None:
    site.agent("h1", (1,), at="gpu1.example:7071", bt_port=6999)
    assert site.announce("h9").complete == 0


def test_a_client_stands_where_the_agent_of_its_host_stands(site: Site) -> None:
    for name, zone, rack in (("h1", "a", "r1"), ("h2", "a", "r1"), ("h3", "a", "r2"), ("h4", "b", "r1")):
        site.agent(name, zone=zone, rack=rack)
    site.now += 10
    for name in ("h4", "h3", "h2"):
        site.announce(name)
    assert names(site.announce("h1")) == ["h2", "h3", "h4"]


def test_agents_at_one_address_that_stand_apart_say_nothing(site: Site) -> None:
    site.agent("x1", at="10.0.0.1:1", zone="a", rack="r1")
    site.agent("y1", at="10.0.0.1:2", zone="a", rack="r2")
    site.agent("x2", at="[fd00::2]:1", zone="a", rack="r1")
    site.agent("y2", at="[fd00::2]:2", zone="b", rack="r1")
    found = {ip: site.announces.addresses.find(packed_ip(ip) or b"", now=99.0) for ip in ("10.0.0.1:0", "[fd00::2]:0")}
    assert found == {"10.0.0.1:0": ("a", ""), "[fd00::2]:0": ("", "")}


def test_web_seeds_are_whole_and_near(site: Site) -> None:
    site.agent("h1", (1,), zone="b")
    site.agent("h2", (1,), zone="a", rack="r2", tls=True)
    site.agent("h3", (1,), zone="a", rack="r1")
    site.agent("h4", (0,), zone="a", rack="r1")
    gone = site.agent("h5", (1,), zone="a", rack="r1")
    site.fleet.handle(SessionClosed(gone), now=site.now)
    asker = packed_ip("10.0.0.4:0") or b""
    found = site.announces.web_seeds(BLOB, asker, now=site.now + 10, chance=7)
    assert found == ["http://10.0.0.3:7071", "https://10.0.0.2:7071", "http://10.0.0.1:7071"]
    assert site.announces.web_seeds(SECOND, asker, now=0.0, chance=7) == []
    for number in range(10, 40):
        site.agent(f"h{number}", (1,))
    somebody = packed_ip("10.7.7.7:0") or b""
    draws = [site.announces.web_seeds(BLOB, somebody, now=site.now, chance=chance) for chance in range(30)]
    assert {len(draw) for draw in draws} == {core.WEB_SEEDS_MAX} and len({seed for draw in draws for seed in draw}) > 20


# -- properties


@given(st.integers(0, 200), st.integers(0, 300), st.integers(0, (1 << 64) - 1))
def test_a_sample_of_a_pool_has_no_peer_twice(size: int, count: int, chance: int) -> None:
    pool = PeerSet()
    peers = [Peer(b"", number, {}, {}) for number in range(size + 5)]
    for peer in peers:
        pool.add(peer)
    for peer in peers[:5]:
        pool.remove(peer)
    sample = list(pool.sample(count, chance))
    assert len(sample) == len(set(sample)) == min(count, size) and set(sample) <= set(peers[5:])


STEPS = st.tuples(
    st.integers(0, 12),  # who
    st.integers(0, 3),  # from where
    st.sampled_from([6881, 6882]),
    st.sampled_from([0, 1]),  # left
    st.sampled_from(["", "started", "stopped", "completed"]),
    st.sampled_from([b"", b"a", b"b"]),
    st.sampled_from([V1, V2]),
    st.sampled_from([("", ""), ("a", ""), ("a", "r1"), ("b", "r1")]),
    st.integers(0, 40),  # seconds later
    st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_what_holds_whatever_is_announced(steps: list[Any]) -> None:
    """Nobody is told of himself, no seed of seeds, nobody twice; the counts are those of a plain
    list; nothing is left in the end."""
    site = Site()
    site.agent("h12", (1,), bt_port=6881)
    for who, where, port, left, event, key, info_hash, (zone, rack), later, chance in steps:
        site.now += later
        ip = f"fd00::{where}" if where == 3 else f"10.0.0.{where or who}"
        said = {"port": port, "left": left, "event": event, "key": key, "info_hash": info_hash}
        answer = site.announce(f"p{who}", ip=ip, zone=zone, rack=rack, chance=chance, **said)
        torrent: TorrentSwarm = site.announces._by_hash[V1]
        here = packed_ip(f"{ip}:0" if where != 3 else f"[{ip}]:0"), port
        ids = [contact.peer_id for contact in answer.peers]
        assert here not in addresses(answer) and peer_id(f"p{who}") not in ids
        assert len(addresses(answer)) == len(answer.peers)
        seeds = {endpoint for endpoint, peer in torrent.at.items() if peer.seed}
        assert left or not seeds & addresses(answer)
        assert addresses(answer) <= torrent.at.keys()
        everybody = [*torrent.announced.values(), *torrent.members.values()]
        usable = [peer for peer in everybody if info_hash in peer.heard]
        seeding = sum(peer.seed for peer in usable)
        assert (answer.complete, answer.incomplete) == (seeding, len(usable) - seeding)
        assert addresses(answer) <= {endpoint for peer in usable for endpoint in peer.endpoints()}
        assert len(torrent.at) == sum(len(peer.ips) for peer in everybody)
        assert site.announces.peers == len(torrent.announced)
        assert all(peer.expires_at > site.now for peer in torrent.announced.values())
    site.announces.expire(now=site.now + 10_000)
    assert not site.announces._networks and not site.announces._expiry and site.announces.peers == 0


@pytest.mark.parametrize(
    ("port", "known"), [("0", True), ("65535", True), ("65536", False), ("-1", False), ('"1"', False)]
)
def test_the_port_of_an_agent_is_a_port(port: str, known: bool) -> None:
    hello = f'{{"type":"hello","protocol":1,"host":"h1","address":"h1:1","bt_port":{port}}}'
    try:
        assert decode_from_agent(hello) == Hello(1, "h1", "h1:1", bt_port=int(port)) and known
    except UsageError:
        assert not known
