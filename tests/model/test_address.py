"""Addresses taken apart: host and port, names and numbers."""

from __future__ import annotations

import pytest

from p2pdist.model.address import (
    Vicinity,
    address_text,
    by_name,
    host_part,
    ip_of,
    is_loopback,
    on_this_machine,
    parse_address,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("node-7.rack1:7071", "node-7.rack1", 7071),
        ("192.0.2.1:1", "192.0.2.1", 1),
        ("[::1]:7071", "::1", 7071),
        ("[2001:db8::1]:65535", "2001:db8::1", 65535),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert parse_address(address) == (host, port)
    assert address_text(host, port) == address
    assert host_part(address) == host


@pytest.mark.parametrize(
    "wrong", ["", "h", ":1", "h:", "h:0", "h:65536", "h:-1", "h:1x", "h:²", "::1:7071", "2001:db8::1", "[]:1"]
)
def test_other_text_is_none(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        parse_address(wrong)


@pytest.mark.parametrize(
    ("host", "ip"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("node1", None),
        ("127.1", None),
        ("2130706433", None),
        ("", None),
    ],
)
def test_numbers_are_an_ip_address_and_names_are_none(host: str, ip: str | None) -> None:
    found = ip_of(host)
    assert (None if found is None else str(found)) == ip


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
    ],
)
def test_what_means_the_machine_itself(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_a_service_on_loopback_is_for_this_machine() -> None:
    hosts = ("localhost", "127.0.0.1", "127.3.4.5", "::1", "0.0.0.0", "::", "10.0.0.1", "node1")
    assert [on_this_machine(host) for host in hosts] == [True] * 4 + [False] * 4


def test_a_name_has_to_be_looked_up() -> None:
    assert [address for address in ("h:1", "10.0.0.1:1", "[::1]:1", "", ":1") if by_name(address)] == ["h:1"]


@pytest.mark.parametrize(
    ("announced", "session", "host", "address", "allowed"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", "node2", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", "node2", "127.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", "node2", "::1", False),
        ("10.0.0.1", "10.0.0.1", "node2", "::ffff:127.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", "node2", "0.0.0.0", False),
        ("10.0.0.1", "10.0.0.1", "node2", "169.254.169.254", False),
        ("10.0.0.1", "10.0.0.1", "node2", "fe80::1%eth0", False),
        ("10.0.0.1", "10.0.0.1", "127.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", "localhost", "127.0.0.1", False),
        ("10.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("10.0.0.1", "127.0.0.1", "localhost", "::1", True),
        ("10.0.0.1", "127.0.0.1", "node2", "127.0.0.1", False),
        ("node1", "127.0.0.1", "NODE1", "127.0.1.1", True),
        ("10.0.0.1", "10.0.0.1", "this", "127.0.1.1", True),
        ("10.0.0.1", "10.0.0.1", "this.example", "127.0.1.1", False),
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1", True),
        ("localhost", "", "localhost", "127.0.0.1", True),
        ("127.0.0.2", "", "node2", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", "node2", "169.254.169.254", False),
        ("169.254.1.1", "", "169.254.1.2", "169.254.1.2", True),
        ("169.254.1.1", "", "node2.local", "169.254.1.2", True),
        ("10.0.0.1", "fe80::1", "fe80::2", "fe80::2", True),
        ("10.0.0.1", "fe80::1", "node2", "fe80::2%eth0", False),
        ("127.0.0.1", "127.0.0.1", "224.0.0.1", "224.0.0.1", False),
    ],
)
def test_what_is_near_is_connected_to_from_there_alone(
    announced: str, session: str, host: str, address: str, allowed: bool
) -> None:
    problem = Vicinity(announced, session, machine="this").problem(host, address)
    assert (problem == "") is allowed
    assert allowed or address in problem
