"""Certificates of a fleet's authority over real TLS connections, signing keys, join tokens."""

import socket
import ssl
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.credentials.authority import (
    TRACKER_DNS,
    Authority,
    agent_dns,
    encode_key,
    expires_at,
    issued_by_fleet,
    make_key,
    make_request,
    name_in,
    pinned,
    split_pem,
)
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.signing import SigningKey, VerifyKeys
from p2pdist.credentials.tokens import create_token, split_token, verify_token
from p2pdist.model.errors import Refused, UsageError

NOW = time.time()


@pytest.fixture(scope="module")
def authority():
    return Authority.create("prod", now=NOW)


def context(tmp_path, authority, kind, name, *, server, now=NOW):
    """A TLS context of one side, with a certificate of the authority."""
    key = make_key()
    files = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}.pem"
    files.write_bytes(encode_key(key) + authority.issue(make_request(key), kind, name, ["127.0.0.1"], now=now))
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.load_cert_chain(files)
    made.load_verify_locations(cadata=authority.pem.decode())
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def greet(server, client, called):
    """Connect; returns the certificates that the server and the client see."""
    seen = {}
    one, other = socket.socketpair()

    def serve():
        try:
            with server.wrap_socket(one, server_side=True) as secured:
                secured.recv(1)
                seen["by server"] = secured.getpeercert()
        except OSError:
            one.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(other, server_hostname=called) as secured:
            seen["by client"] = secured.getpeercert()
            secured.send(b"x")
            secured.unwrap()
    except OSError as error:
        seen["error"] = error
        other.close()
    thread.join(60)
    return seen


@pytest.mark.parametrize("name", ["h1", "räck 7/ü", "a" * 255, "*.example", "host.with.dots"])
def test_both_ends_learn_which_host_they_speak_with(tmp_path, authority, name):
    server = context(tmp_path, authority, "agent", name, server=True)
    client = context(tmp_path, authority, "agent", "caller", server=False)
    seen = greet(server, client, agent_dns(name))
    assert name_in(seen["by client"], "prod", "agent") == name
    assert name_in(seen["by server"], "prod", "agent") == "caller"
    assert name_in(seen["by server"], "prod", "tracker") == ""
    assert name_in(seen["by server"], "other", "agent") == ""


def test_no_agent_passes_for_another_or_for_a_tracker(tmp_path, authority):
    server = context(tmp_path, authority, "agent", "h1", server=True)
    client = context(tmp_path, authority, "agent", "h2", server=False)
    for called in (agent_dns("h3"), TRACKER_DNS):
        assert isinstance(greet(server, client, called)["error"], ssl.SSLCertVerificationError)
    tracker = context(tmp_path, authority, "tracker", "t1", server=True)
    assert "by client" in greet(tracker, client, TRACKER_DNS)


def test_a_certificate_of_another_authority_or_time_is_refused(tmp_path, authority):
    client = context(tmp_path, authority, "agent", "h2", server=False)
    foreign = context(tmp_path, Authority.create("prod", now=NOW), "agent", "h1", server=True)
    old = context(tmp_path, authority, "agent", "h1", server=True, now=NOW - 2 * 86400)
    for server in (foreign, old):
        assert isinstance(greet(server, client, agent_dns("h1"))["error"], ssl.SSLError)


def test_a_token_of_a_machine_whose_clock_is_ahead_counts_from_now_on():
    key, now = SigningKey.create(), time.time()
    text, record = create_token(key, "prod", "0" * 64, "scheduler", now=now + 3600, lasts_s=60)
    claims = verify_token(split_token(text)[1], {key.name: key.public}, "prod")
    assert claims.id == record.id and claims.expires == record.expires


def test_an_authority_is_kept_as_pem(authority):
    loaded = Authority.load("prod", authority.pem, encode_key(authority.key))
    assert loaded.fingerprint == authority.fingerprint
    assert abs(loaded.created_at - NOW) < 2
    with pytest.raises(UsageError):
        Authority.load("prod", authority.pem, encode_key(make_key()))
    for name in ("", "Prod", "a b", "-a", "a" * 80):
        with pytest.raises(UsageError):
            Authority.create(name, now=NOW)


def test_a_pin_finds_its_authority_among_several(authority):
    other = Authority.create("prod", now=NOW)
    assert pinned(other.pem + authority.pem, authority.fingerprint) == authority.pem
    with pytest.raises(Refused, match="pins"):
        pinned(other.pem, authority.fingerprint)
    for text in (b"", b"x" * 1000, authority.pem[:200]):
        with pytest.raises(Refused):
            pinned(text, authority.fingerprint)
    assert split_pem(other.pem + authority.pem) == [other.pem, authority.pem]


def test_a_certificate_ends_after_a_day(authority):
    issued = authority.issue(make_request(make_key()), "agent", "h1", now=NOW)
    assert abs(expires_at(issued) - NOW - 86400) < 2


@pytest.mark.parametrize(
    "request_", [b"", b"x", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"]
)
def test_what_is_no_signing_request_is_refused(authority, request_):
    with pytest.raises(UsageError):
        authority.issue(request_, "agent", "h1", now=NOW)


def test_a_signing_request_with_a_broken_signature_is_refused(authority):
    import base64

    lines = make_request(make_key()).decode().splitlines()
    der = bytearray(base64.b64decode("".join(lines[1:-1])))
    der[-1] ^= 1
    broken = "\n".join([lines[0], base64.b64encode(der).decode(), lines[-1]])
    with pytest.raises(UsageError):
        authority.issue(broken.encode(), "agent", "h1", now=NOW)


def test_signatures_of_the_right_key_alone_are_right():
    key, other = SigningKey.create(), SigningKey.create()
    keys = VerifyKeys({key.name: key.public})
    assert keys.verify(key.name, b"message", key.sign(b"message"))
    assert not keys.verify(key.name, b"message2", key.sign(b"message"))
    assert not keys.verify(key.name, b"message", other.sign(b"message"))
    assert not keys.verify(other.name, b"message", other.sign(b"message"))
    assert SigningKey.load(key.pem).name == key.name
    for pem in (b"", encode_key(make_key())):
        with pytest.raises(UsageError):
            SigningKey.load(pem)
    with pytest.raises(UsageError):
        VerifyKeys({"k": "AAAA"})


WRONG_LENGTH = (
    b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VvBCIEIDVrYAd1a3WzqfnDmV03Y7szG3O/TjRLpr1erPWmKDOT\n"
    b"-----END PRIVATE KEY-----\n"
)
"""An X448 key of 32 bytes, for which OpenSSL has an error of its own."""


def test_a_key_of_the_wrong_length_is_told_as_one_that_cannot_be_read():
    with pytest.raises(UsageError, match="no Ed25519 key"):
        SigningKey.load(WRONG_LENGTH)
    with pytest.raises(UsageError, match="cannot be read"):
        Authority.load("prod", Authority.create("prod", now=time.time()).pem, WRONG_LENGTH)


def test_a_join_token_fits_its_own_secret_and_shows_it_to_nobody():
    token = JoinToken.create("ab" * 32, "default")
    assert JoinToken.parse(f" {token}\n") == token
    assert token.fits(token.secret_sha256)
    assert not token.fits(JoinToken.create("ab" * 32, "default").secret_sha256)
    assert token.secret not in repr(token)


@given(st.text(max_size=200))
def test_other_text_is_no_join_token(text):
    with pytest.raises(UsageError) as failure:
        JoinToken.parse(text)
    assert len(text) < 8 or text not in str(failure.value)


def test_the_name_of_an_authority_with_more_beside_it_is_not_the_fleets():
    """Whoever runs another authority that agents may come from chooses its name."""
    own = (("commonName", "p2pdist prod"),)
    assert issued_by_fleet({"issuer": (own,)}, "prod")
    for issuer in ((), (own, own), ((("organizationName", "x"),), own), (own[0],), ((own[0], own[0]),)):
        assert not issued_by_fleet({"issuer": issuer}, "prod")
    assert not issued_by_fleet(None, "prod")
