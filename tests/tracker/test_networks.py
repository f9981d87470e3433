"""Addresses that the tracker believes of an agent."""

from __future__ import annotations

import pytest

from p2pdist.model.errors import P2PDistError, Refused, UsageError
from p2pdist.model.messages import PROTOCOL_VERSION, Hello
from tracker.networks import check_address, parse_networks

PRIVATE = "10.0.0.0/8, fd00::/8"


@pytest.mark.parametrize(
    "address, remote, networks, believed",
    [
        ("10.0.0.1:7071", "10.0.0.1", "", True),
        ("10.0.0.1:7071", "127.0.0.1", "", True),
        ("10.0.0.1:7071", "192.0.2.1", PRIVATE, True),
        ("192.0.2.1:7071", "10.0.0.1", PRIVATE, False),
        ("[fd00::1]:7071", "fd00::1", PRIVATE, True),
        ("[2001:db8::1]:7071", "fd00::1", PRIVATE, False),
        ("[::ffff:10.0.0.1]:7071", "10.0.0.1", PRIVATE, True),
        ("127.0.0.1:7071", "127.0.0.1", "", True),
        ("127.0.0.1:7071", "127.0.0.1", PRIVATE, True),
        ("127.0.0.1:7071", "::1", "", True),
        ("127.0.0.1:22", "10.0.0.1", "", False),
        ("127.8.9.1:22", "10.0.0.1", "", False),
        ("[::1]:22", "10.0.0.1", "", False),
        ("[::ffff:127.0.0.1]:22", "10.0.0.1", "", False),
        ("0.0.0.0:22", "10.0.0.1", "", False),
        ("[::]:22", "10.0.0.1", "", False),
        ("169.254.169.254:80", "10.0.0.1", "", False),
        ("169.254.1.1:7071", "169.254.1.1", "", True),
        ("[fe80::2]:7071", "fe80::2%eth0", "", True),
        ("[fe80::2]:7071", "10.0.0.1", "", False),
        ("224.0.0.1:7071", "10.0.0.1", "", False),
        ("node1:7071", "10.0.0.1", "", True),
        ("localhost:22", "10.0.0.1", "", False),
        ("x.LOCALHOST.:22", "10.0.0.1", "", False),
        ("localhost:7071", "127.0.0.1", "", True),
        ("127.1:22", "10.0.0.1", "", False),
        ("2130706433:22", "10.0.0.1", "", False),
        ("0x7f.0.0.1:22", "10.0.0.1", "", False),
        ("0177.0.0.0x1:22", "10.0.0.1", "", False),
        ("node1:7071", "10.0.0.1", PRIVATE, False),
    ],
)
def test_what_is_believed_depends_on_where_the_session_comes_from(
    address: str, remote: str, networks: str, believed: bool
) -> None:
    hello = Hello(PROTOCOL_VERSION, "h1", address)
    if believed:
        check_address(hello, remote, parse_networks(networks))
    else:
        with pytest.raises(Refused) as refused:
            check_address(hello, remote, parse_networks(networks))
        assert refused.value.remedy


@pytest.mark.parametrize("text", ["10.0.0.0/33", "intranet", "10.0.0.0/8,,x", ",".join(["10.0.0.0/8"] * 300)])
def test_networks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_networks(text)


@pytest.mark.parametrize("address", ["nowhere", ":1", "h:0", "::1:7071"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(P2PDistError):
        check_address(Hello(PROTOCOL_VERSION, "h1", address), "10.0.0.1", ())
