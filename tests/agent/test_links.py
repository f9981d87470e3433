"""Which of its addresses a host gives to others, on real interfaces in a network namespace of its
own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.root

SCRIPT = """
import sys
from p2pdist.agent.tracker.address import address_for_others
print(address_for_others(sys.argv[1], sys.argv[2]))
"""
BOTH = ("10.9.0.7/24", "fd00::7/64", "fe80::7/64")
ROUTE = "ip route add default via 10.8.0.1"
SECOND = (
    "ip link add d1 type veth peer name e1; ip link set e1 up; ip link set d1 up; ip address add 10.8.0.7/24 dev d1"
)


def given(local: str, listens: str, addresses: tuple[str, ...] = BOTH, more: str = "true") -> str:
    """What a host with these addresses gives to others when `local` is its address in the session
    with the tracker."""
    adds = "".join(f"ip address add {each} dev d0{' nodad' * (':' in each)}; " for each in addresses)
    script = f'ip link set lo up; ip link add d0 type veth peer name e0; ip link set e0 up; ip link set d0 up; {adds}{more}; exec "$@"'
    words = ["unshare", "--net", "sh", "-ec", script, "sh", sys.executable, "-c", SCRIPT, local, listens]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("local", "listens", "expected"),
    [
        ("10.9.0.7", "0.0.0.0", "10.9.0.7"),
        ("10.9.0.7", "::", "10.9.0.7"),
        ("fd00::7", "::", "fd00::7"),
        ("fe80::7%d0", "::", "fd00::7"),
        ("127.0.0.1", "0.0.0.0", "10.9.0.7"),
        ("::1", "::", "fd00::7"),
        ("fd00::7", "0.0.0.0", "10.9.0.7"),
        ("::ffff:10.9.0.7", "::", "10.9.0.7"),
    ],
    ids=["its own", "both families", "IPv6", "link-local", "loopback", "IPv6 loopback", "IPv4 alone", "mapped"],
)
def test_the_address_means_this_host_elsewhere_and_is_listened_on(local: str, listens: str, expected: str) -> None:
    assert given(local, listens) == expected


def test_a_tracker_on_this_host_is_told_the_address_of_the_default_route() -> None:
    """The first interface may be a bridge for containers, which is another network at each host."""
    assert given("127.0.0.1", "0.0.0.0", ("172.17.0.1/16",), f"{SECOND}; {ROUTE}") == "10.8.0.7"


def test_without_a_network_loopback_is_all_there_is() -> None:
    assert given("127.0.0.1", "0.0.0.0", ()) == "127.0.0.1"
