"""What operators have hosts do, over real trackers and agents: drain them, and evict packages, by
the command line and the typed client; and what each host says of itself."""

from __future__ import annotations

import os

import pytest
from site_rig import Agent, Site, until

from p2pdist.client import EvictRequest, NotFound, PreseedRequest, SyncTracker

MIB = 1 << 20
PACKAGE = "team/app:v1"


def publish(site: Site) -> None:
    source = site.directory / "source"
    source.mkdir()
    (source / "weights").write_bytes(os.urandom(4 * MIB))
    layout = ("--layout", str(site.directory / "layout"))
    for words in (
        ("pack", str(source), "-t", PACKAGE, "--format", "tree", *layout),
        ("push", PACKAGE, "--origin", f"file://{site.layout}", *layout),
    ):
        code, _, errors = site.command(*words)
        assert code == 0, errors


def told(client: SyncTracker, *names: str) -> None:
    """Wait until the agents of hosts have said how they do."""
    until(lambda: all(client.host(name).version for name in names))


@pytest.mark.slow
def test_a_package_is_evicted_from_hosts_and_each_says_what_came_of_it(site: Site) -> None:
    publish(site)
    agents = site.agents(3, zone="z0")
    for agent in agents:
        agent.pull(package=PACKAGE)
    at = ("--tracker", site.tracker_url)
    code, _, errors = site.command("pin", PACKAGE, "--socket", str(agents[1].socket))
    assert code == 0, errors
    with SyncTracker(site.tracker_url) as client:
        told(client, "h0", "h1", "h2")
        code, answer, errors = site.command("evict", PACKAGE, "--host", "h0", *at)
        assert code == 0, errors
        assert not answer["stayed_hosts"], answer
        assert (answer["evicted"], answer["evicted_hosts"][0]["host"]) == (1, "h0")
        assert answer["bytes_freed"] > 3 * MIB
        code, document, _ = site.command("ls", "--socket", str(agents[0].socket))
        assert code == 0 and PACKAGE not in str(document)

        code, answer, errors = site.command("evict", PACKAGE, "--everywhere", *at)
        assert code != 0 and "stays on one host" in errors, errors
        assert (answer["asked"], answer["evicted"], answer["lacked"], answer["stayed"]) == (3, 1, 1, 1)
        assert [(host["host"], "pinned" in host["reason"]) for host in answer["stayed_hosts"]] == [("h1", True)]

        digest = client.evict(EvictRequest(PACKAGE, hosts=("h2",)))
        assert (digest.lacked, digest.evicted) == (1, 0)
        with pytest.raises(NotFound, match="no host has zone=z7"):
            client.evict(EvictRequest(PACKAGE, selector="zone=z7"))
        with pytest.raises(NotFound, match="h9"):
            client.evict(EvictRequest(PACKAGE, hosts=("h9",)))
    text = site.directory.joinpath("tracker.log").read_text()
    assert f"{PACKAGE} was evicted from one host, h0" in text


@pytest.mark.slow
def test_what_a_preseed_brought_is_evicted_by_the_tag_that_it_named(site: Site) -> None:
    """Hosts get the package of a preseed by digest, so no tag there says which one it is. A tag
    that the origin has no longer, as of a package that is withdrawn, counts as last known."""
    publish(site)
    agents = site.agents(2, zone="z0")
    with SyncTracker(site.tracker_url) as client:
        told(client, "h0", "h1")
        assert client.wait(client.preseed(PreseedRequest(PACKAGE, id="one", count=2)).id).hosts_done == 2
        kept = client.evict(EvictRequest(PACKAGE, everywhere=True))
        assert (kept.stayed, kept.lacked, kept.evicted) == (2, 0, 0), "the preseed has pinned it"
        client.cancel("one")
        until(lambda: not site.command("pin", "--list", "--socket", str(agents[0].socket))[1])
        gone = client.evict(EvictRequest(PACKAGE, hosts=("h0",)))
        assert (gone.stayed, gone.lacked, gone.evicted) == (0, 0, 1)
        assert site.command("rm", PACKAGE, "--at-origin", "--origin", f"file://{site.layout}")[0] == 0
        until(lambda: not site.command("pin", "--list", "--socket", str(agents[1].socket))[1])
        gone = client.evict(EvictRequest(PACKAGE, everywhere=True))
        assert (gone.stayed, gone.lacked, gone.evicted) == (0, 1, 1)


@pytest.mark.slow
def test_a_drained_host_serves_no_other_and_is_picked_by_no_preseed(site: Site) -> None:
    publish(site)
    first = Agent(site, "h0").start()
    first.pull(package=PACKAGE)
    at = ("--tracker", site.tracker_url)
    with SyncTracker(site.tracker_url) as client:
        client.drain("h0")
        assert client.host("h0").drained
        with pytest.raises(NotFound, match="h7"):
            client.drain("h7")
        second = Agent(site, "h1").start()
        came = second.pull(package=PACKAGE).bytes_peers
        assert came, "what no other host has comes from it rather than from the origin"
        until(lambda: first.metric("p2pdist_agent_sent_bytes_total") >= came)  # it counts what it has sent later
        sent = first.metric("p2pdist_agent_sent_bytes_total")
        order = ("preseed", PACKAGE, "--count", "1", "--id", "one", *at)
        assert site.command(*order)[0] == 0
        assert client.wait("one").hosts_done == 1
        third = Agent(site, "h2").start()
        third.pull(package=PACKAGE)
        assert first.metric("p2pdist_agent_sent_bytes_total") == sent, "another host has it by now"
        first.kill()
        first.start()
        until(lambda: client.host("h0").present)
        assert client.host("h0").drained, "a new start of the agent changes nothing"
        assert site.command("hosts", "fill", "h0", *at)[:2] == (0, {"host": "h0", "drained": False})
        assert site.command("hosts", "--json", "drain", "h0", *at)[:2] == (0, {"host": "h0", "drained": True})
        client.fill("h0")
        assert not client.host("h0").drained
        told(client, "h2")
        host = client.host("h2")
        assert host.version and host.disk_free_bytes and host.store_bytes is not None
