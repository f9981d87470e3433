"""Requests to a tracker that is not believed yet: its authorities, a first certificate, another
one; and why a connection to it failed. Names are looked up as the caller says."""

from __future__ import annotations

import re
import ssl
import time
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver

from p2pdist.credentials.authority import pinned
from p2pdist.model.errors import UNDECODABLE, Corrupt, Unavailable, UsageError, from_problem, unreached
from p2pdist.model.request_id import passed_on
from p2pdist.model.url import redacted

ANSWER_BYTES_MAX = 1 << 18
REQUEST_S_MAX = 20.0
CONNECT_S_MAX = 5.0

_NO_TLS = ("WRONG_VERSION_NUMBER", "wrong version number", "record layer failure", "RECORD_LAYER_FAILURE")
"""What OpenSSL says of an answer that is no TLS."""

_TIME_CODES = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_CONTEXT = re.compile(r" ssl:(?:<[^>]*>|default|True|False)")

Answer = TypeVar("Answer", bound=msgspec.Struct)


async def authorities(url: str, resolver: AbstractResolver) -> tuple[bytes, str]:
    """What a tracker states as the fleet's authorities (PEM), not to be believed yet, and the
    address of this host's end of the connection. Raises Unavailable."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    return await _exchange("GET", url, "/v1/access/authorities", None, unverified, None, resolver)


def pinned_authority(stated: bytes, pin: str) -> str:
    """The authority with a fingerprint, PEM, of those that a tracker states. Raises Refused."""
    return pinned(stated, pin).decode()


def trusting(authority: str) -> ssl.SSLContext:
    """A client's context that believes certificates of this authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority)
    except ValueError as error:
        raise UsageError(f"the authority cannot be used: {error}") from error
    return context


async def post(
    url: str,
    body: msgspec.Struct,
    kind: type[Answer],
    context: ssl.SSLContext,
    name: str,
    resolver: AbstractResolver,
) -> Answer:
    """What a tracker with a certificate for `name` answers to a POST. Raises the failure in its
    problem document, Corrupt and Unavailable."""
    data, _ = await _exchange("POST", url, "", msgspec.json.encode(body), context, name, resolver)
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"{redacted(url)} answers, but not as a tracker does") from error


async def _exchange(
    method: str,
    url: str,
    path: str,
    body: bytes | None,
    context: ssl.SSLContext,
    name: str | None,
    resolver: AbstractResolver,
) -> tuple[bytes, str]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX, sock_connect=CONNECT_S_MAX)
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
    headers = {"Content-Type": "application/json", **passed_on()} if body is not None else passed_on()
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            http.request(
                method, url + path, data=body, headers=headers, ssl=context, server_hostname=name, allow_redirects=False
            ) as answer,
        ):
            own_end = _own_end(answer)
            data = await answer.content.read(ANSWER_BYTES_MAX + 1)
            while len(data) <= ANSWER_BYTES_MAX and (more := await answer.content.read(ANSWER_BYTES_MAX)):
                data += more
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        raise Unavailable(
            f"the certificate of the tracker {redacted(url)} is not of this fleet: {reason}",
            remedy=wrong_time(error)
            or "Check --tracker; another fleet's tracker, or another program, may answer there",
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = in_words(error, url).replace(url, redacted(url))
        raise Unavailable(f"the tracker {redacted(url)} does not answer: {reason}") from error
    if len(data) > ANSWER_BYTES_MAX:
        raise Corrupt(f"the tracker {redacted(url)} answers more than {ANSWER_BYTES_MAX} bytes")
    if answer.status != 200:
        raise _problem(data, f"the tracker {redacted(url)} answered {answer.status}")
    return data, own_end


def in_words(error: BaseException, url: str = "") -> str:
    """Why a connection to a tracker failed, and what may be wrong where one side has access control
    and the other has not; aiohttp's text without what it says of Python's objects."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        why = {
            HTTPStatus.UNAUTHORIZED: ": it takes agents of its fleet alone. Start this one with --join-file",
            HTTPStatus.NOT_FOUND: ": it is no tracker, as an agent is none. Check --tracker",
            HTTPStatus.FORBIDDEN: ": this host, or the join token with which it came, may be revoked",
        }.get(HTTPStatus(error.status) if error.status in set(HTTPStatus) else HTTPStatus.OK, "")
        return f"it answers {error.status} to a session{why}"
    text = _CONTEXT.sub("", unreached(error))
    return f"{text}. {hint}" if (hint := mismatch(error, url)) else text


def mismatch(error: BaseException, url: str) -> str:
    """What may be wrong where a connection to the tracker at `url` failed because one side speaks
    TLS as the other does not expect; "" for any other failure."""
    if hint := wrong_time(error):
        return hint
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "A tracker with --access has a certificate of its fleet's authority: give the agent its --join-file"
    if isinstance(error, aiohttp.ClientConnectorSSLError) and any(sign in str(error) for sign in _NO_TLS):
        return "It seems to speak no TLS: start the tracker with --access, or write http:// and leave out --join-file"
    if url.startswith("http://") and isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "If it runs with --access, write https:// and give the agent its --join-file"
    return ""


def wrong_time(error: BaseException) -> str:
    """Whose clock to look at where a certificate was refused for its time; "" for any other
    failure."""
    refusal = getattr(error, "certificate_error", None)
    if getattr(refusal, "verify_code", 0) not in _TIME_CODES:
        return ""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"It is {now} by the clock of this host: compare it with the tracker's"


def _own_end(answer: aiohttp.ClientResponse) -> str:
    """The address of this end of a connection, "" where the answer came with its end."""
    connection = answer.connection
    local: Any = connection.transport.get_extra_info("sockname") if connection and connection.transport else None
    return str(local[0]) if local else ""


def _problem(body: bytes, otherwise: str) -> Exception:
    try:
        return from_problem(msgspec.json.decode(body, type=dict[str, Any]))
    except UNDECODABLE:
        return Unavailable(otherwise)
