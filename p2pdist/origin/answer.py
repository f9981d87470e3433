"""What a storage's refusal means: the one place that turns the codes of S3, Google, Azure and web
servers into our failures.

Theory. A refusal stays what it is until an operator changes rights, clock, region or address, so it
is Refused (or NotFound) and ends a pull at once. An outage passes, so it is Unavailable and worth
waiting for. The HTTP status alone does not tell them apart: S3 answers an expired token, a wrong
region and a slow client all with 400. The code in the body does; a 4xx with a code that is not
known here is a refusal.

obstore gives what the server said as text: the request, then either `Server returned non-2xx status
code: STATUS: BODY` or what went wrong with the connection, then a dump of its own values.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from p2pdist.model.errors import NotFound, P2PDistError, Refused, Unavailable, Unsuitable, UsageError
from p2pdist.model.url import redacted

MESSAGE_MAX = 200
_BUSY_STATUS = frozenset({408, 423, 425, 429})

_BUSY = frozenset(
    (
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "ServiceUnavailable",
        "ServerBusy",
        "InternalError",
        "RequestTimeout",
        "RequestTimeTooLong",
        "OperationTimedOut",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
        "OperationAborted",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "ServerNotInitialized",
        "Busy",
        "rateLimitExceeded",
        "userRateLimitExceeded",
        "backendError",
        "ContainerBeingDeleted",
        "AccountBeingCreated",
        "XMinioServerNotInitialized",
    )
)
"""Codes of storage that may answer otherwise in a while, whatever their status."""

_EXPIRED = "the credentials have expired"
_UNKNOWN_KEY = "the storage does not know this access key"
_CLOCK = "this host's clock is wrong"
_REGION = "the bucket is in another region"
_QUOTA = "the quota of the storage is used up"
_NO_BUCKET = "the bucket does not exist"
_DENIED = "access is denied"
_NOT_ACCEPTED = "the credentials are not accepted"

_CAUSES = {
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the session token is not valid",
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "InvalidClientTokenId": _UNKNOWN_KEY,
    "UnrecognizedClientException": _UNKNOWN_KEY,
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "RequestNotYetValid": _CLOCK,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidRegionName": _REGION,
    "QuotaExceeded": _QUOTA,
    "quotaExceeded": _QUOTA,
    "InsufficientStorage": _QUOTA,
    "XMinioStorageFull": "the storage is full",
    "XMinioAdminBucketQuotaExceeded": _QUOTA,
    "TooManyObjects": _QUOTA,
    "NoSuchBucket": _NO_BUCKET,
    "ContainerNotFound": "the container does not exist",
    "ContainerDisabled": "the container is disabled",
    "InvalidBucketName": "that is no name of a bucket",
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AuthorizationFailure": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
    "InsufficientAccountPermissions": _DENIED,
    "forbidden": _DENIED,
    "PERMISSION_DENIED": _DENIED,
    "AuthenticationFailed": _NOT_ACCEPTED,
    "InvalidAuthenticationInfo": _NOT_ACCEPTED,
    "NoAuthenticationInformation": "it asks for credentials, and was given none",
    "authError": _NOT_ACCEPTED,
    "UNAUTHENTICATED": _NOT_ACCEPTED,
    "invalid_grant": _NOT_ACCEPTED,
    "AccountProblem": "the account is not in order",
    "UserProjectAccountProblem": "the account is not in order",
    "AccountIsDisabled": "the account is disabled",
    "InvalidObjectState": "it has been moved to an archive",
    "NotImplemented": "the storage cannot do this",
    "MethodNotAllowed": "the storage cannot do this",
}

_REMEDIES = {
    _EXPIRED: "Get new ones, and set AWS_SESSION_TOKEN with the keys; a running tracker or agent must be started again with them",
    _UNKNOWN_KEY: "Check AWS_ACCESS_KEY_ID, and that AWS_ENDPOINT_URL names the storage that gave it",
    _CLOCK: "Set the clock: run chrony or systemd-timesyncd",
    _REGION: "Set AWS_REGION to the region of the bucket, or correct AWS_ENDPOINT_URL",
    _QUOTA: "Remove packages there (p2pdist gc --origin), or have the quota raised",
    "the storage is full": "Remove packages there (p2pdist gc --origin), or give it more disks",
    _NO_BUCKET: "Create the bucket or correct its name",
    "the container does not exist": "Create the container or correct its name",
    "it has been moved to an archive": "Restore it at the storage first",
    "the account is not in order": "See the account and its billing at the provider",
}

_ASKERS = "the process that asks: your shell for push and the like, else the agent or tracker, which then starts anew"
"""Each process has credentials of its own, and a user of `pull` sees the failure of an agent's."""

Cloud = Literal["s3", "gs", "az", "web"]
RIGHTS: dict[Cloud, dict[str, str]] = {
    "s3": {
        "read": "s3:GetObject; s3:ListBucket too, or what is missing looks forbidden",
        "list": "s3:ListBucket",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "write": "storage.objects.create and, for tags, storage.objects.delete",
        "delete": "storage.objects.delete",
    },
    "az": {"read": "Read", "list": "List", "write": "Write (Create, Add)", "delete": "Delete"},
    "web": {},
}
"""The right that each thing takes which an origin does (docs/operations.md has them all)."""

_HEAD = re.compile(r"Error performing [A-Z]+ (\S+) in ")
_STATUS = re.compile(r"non-2xx status code: (\d{3})([^:]*):?\s?(.*)", re.DOTALL)
_CODES = (r"<Code>\s*([\w.-]+)\s*</Code>", r'"(?:reason|status|error)"\s*:\s*"([\w.-]+)"')
_MESSAGES = (
    r"<AuthenticationErrorDetail>(.*?)</AuthenticationErrorDetail>",
    r"<Message>(.*?)</Message>",
    r'"(?:message|error_description)"\s*:\s*"((?:[^"\\]|\\.)*)"',
)
_SIGNS = ((r"skew|clock|timeframe|date header", _CLOCK), (r"expired|time frame", _EXPIRED))
"""What messages tell where the code is the same for every refusal (Azure, Google)."""

_PLACES = r"<(?:Region|Endpoint)>\s*([\w.:-]+)\s*</(?:Region|Endpoint)>"

_CONNECTION = (
    ("connectionrefused", "connection refused"),
    ("connection refused", "connection refused"),
    ("dns error", "the host name is unknown"),
    ("certificate", "its TLS certificate is not trusted"),
    ("notvalidforname", "its TLS certificate is for another name"),
    ("invalidcontenttype", "it does not speak TLS at this port"),
    ("tunnel", "the proxy opens no tunnel to it"),
    ("timedout", "no answer in time"),
    ("timed out", "no answer in time"),
    ("connectionreset", "it broke the connection"),
    ("incompletemessage", "it broke the connection"),
    ("connectionaborted", "it broke the connection"),
    ("unexpectedeof", "it broke the connection"),
    ("hostunreachable", "no route to it"),
    ("networkunreachable", "no route to it"),
)
_REDIRECTED = re.compile(r'"tcp connect error",\s+\S+:(\d+)(?=,)')
"""The address, and the port, of a connection that failed."""

_CERTIFICATE = (
    ("expired", "its TLS certificate has expired"),
    ("notvalidyet", "its TLS certificate is not valid yet; see this host's clock"),
    ("notvalidforname", "its TLS certificate is for another name"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. `status` is 0 where no answer came, or one that obstore does not show;
    `place` is the region or endpoint that it named; `uri` is what was asked for, without its
    query."""

    status: int
    code: str
    message: str
    place: str
    uri: str
    text: str
    dump: str

    @property
    def empty(self) -> bool:
        """Whether it says no more than its status, as every answer to HEAD does."""
        return bool(self.status) and not self.code and not self.message


def read_answer(error: BaseException) -> Answer:
    """What obstore tells in `error`."""
    text, _, dump = str(error).partition("\n\nDebug source")
    request, response = _HEAD.search(text), _STATUS.search(text)
    body = response[3] if response else ""
    status = int(response[1]) if response else 301 if "redirect without LOCATION" in text else 0
    return Answer(
        status,
        _first(_CODES, body),
        " ".join(_first(_MESSAGES, body).split())[:MESSAGE_MAX].rstrip("."),
        _first((_PLACES,), body),
        redacted(request[1]) if request else "",
        text,
        dump,
    )


def _first(patterns: tuple[str, ...], text: str) -> str:
    """What the first of the patterns finds, empty where none does."""
    for pattern in patterns:
        if match := re.search(pattern, text, re.DOTALL):
            return match[1]
    return ""


def missing_storage(answer: Answer) -> bool:
    """Whether a 404 is about the whole bucket, not about one key."""
    return answer.code in ("NoSuchBucket", "ContainerNotFound") or "bucket does not exist" in answer.message


def failure(answer: Answer, what: str, url: str, cloud: Cloud, right: str) -> P2PDistError:
    """The failure to `what`, such as `read index.json`, at the origin `url`; it takes the right
    `right` of RIGHTS."""
    text, dump = answer.text, answer.text + answer.dump
    if "169.254.169.254" in dump or "metadata.google.internal" in dump:
        return Refused(
            f"no credentials for {url}",
            remedy=f"Set them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment of {_ASKERS}",
        )
    proxy = proxy_for(answer.uri)
    through = f" through the proxy {proxy}" if proxy else ""
    if not answer.status:
        return _unreached(answer, f"cannot {what} at {url}{through}", proxy)
    cause = _CAUSES.get(answer.code, "")
    if (answer.status >= 500 and not cause) or answer.status in _BUSY_STATUS or answer.code in _BUSY:
        return Unavailable(
            f"cannot {what} at {url}{through}: it answered {_named(answer, text)}",
            remedy="Wait: it is overloaded or disturbed; see the storage's own health if that lasts",
        )
    if missing_storage(answer):
        cause = _CAUSES.get(answer.code, _NO_BUCKET)
        return NotFound(f"cannot {what}: there is no {url}, {cause}", remedy=_REMEDIES.get(cause, "Correct the URL"))
    if answer.code == "InvalidBucketName":
        return UsageError(f"{url} cannot be: {cause}", remedy="Correct the URL")
    if answer.status == 416:
        return Unsuitable(
            f"{url} cannot {what}{through}: it has no such range of bytes ({_named(answer, text)})",
            remedy="Push the file again if it is shorter there than it was; else use a server that honours Range, such as nginx",
        )
    return _refusal(answer, cause, f"{url} refused to {what}{through}", cloud, right, proxy)


def _refusal(answer: Answer, cause: str, what: str, cloud: Cloud, right: str, proxy: str) -> P2PDistError:
    if cause in ("", _NOT_ACCEPTED):
        cause = next((meaning for sign, meaning in _SIGNS if re.search(sign, answer.message, re.IGNORECASE)), cause)
    if answer.status in (301, 307, 308) and not answer.code:
        cause = _REGION if cloud == "s3" else "it redirects to nowhere"
    details = [part for part in (cause, _named(answer, answer.text)) if part]
    if cause == _REGION and answer.place:
        details.append(f"it is {answer.place}")
    remedy = _REMEDIES.get(cause, "")
    if answer.status == 407:
        named = f"the proxy {proxy}" if proxy else "the proxy on the way"
        remedy = f"Give {named} a user and password in HTTP_PROXY or HTTPS_PROXY"
    elif answer.status == 451:
        remedy = "Its server may not give it away for legal reasons"
    elif not remedy and cloud == "web" and answer.status not in (401, 403):
        remedy = "Check the address; the log of its server says why"
        if proxy:
            remedy += ", or that of the proxy; NO_PROXY names hosts that are asked directly"
    elif not remedy and cloud == "web":
        remedy = (
            "Give this host the URL as http://user:password@host/, or with its query, in P2PDIST_ORIGIN or in the file that "
            "--config names"
        )
        if proxy:
            remedy += ", and what the proxy allows; NO_PROXY names hosts that are asked directly"
    elif not remedy:
        needed = RIGHTS[cloud].get(right, "")
        rights = f" and their rights (this takes {needed})" if needed else ""
        remedy = f"Check the credentials{rights} in the environment of {_ASKERS}"
    return Refused(f"{what}: {', '.join(details)}", remedy=remedy)


def _named(answer: Answer, text: str) -> str:
    """Status, code and message as the storage gave them."""
    status = _STATUS.search(text)
    phrase = f"{status[1]}{status[2].rstrip()}" if status else str(answer.status)
    if not answer.code:
        return phrase
    return f"{answer.code} ({answer.status})" + (f": {answer.message}" if answer.message else "")


def _unreached(answer: Answer, what: str, proxy: str) -> P2PDistError:
    """No answer came, or none that makes sense."""
    lowered = (answer.text + answer.dump).lower()
    why = next((meaning for sign, meaning in _CONNECTION if sign in lowered), "")
    if "certificate" in lowered:
        why = next((meaning for sign, meaning in _CERTIFICATE if sign in lowered), why)
        remedy = "Let this host trust its authority (SSL_CERT_FILE; AWS_CA_BUNDLE for s3://), or correct the URL"
        return Refused(f"{what}: {why}", remedy=remedy)
    if "error following redirect" in lowered:
        return Refused(f"{what}: it redirects in a circle", remedy="Check the address and the settings of its server")
    if "missingcontentlength" in lowered:
        return Unsuitable(
            f"{what}: it does not say how long its answer is (Content-Length)",
            remedy="Use a web server that does, such as nginx over the files; one that compresses as it sends does not",
        )
    if "parsecontentrange" in lowered:
        return Unsuitable(
            f"{what}: it does not say of which file its range is ({answer.text.rpartition(': ')[2][:MESSAGE_MAX]})",
            remedy="Use a web server that honours Range and states sizes (Content-Range: bytes 0-9/10), such as nginx",
        )
    if why and not proxy and (other := _REDIRECTED.search(answer.dump)) and other[1] != str(_port(answer.uri)):
        why += f" at {other[0].split()[-1]}, to which it redirects"
    remedy = "Check that the address is right and the server is up"
    if proxy:
        remedy = "Check that the proxy is up and allows it; NO_PROXY names hosts that are asked directly"
    if not why:
        why = redacted(answer.text.split("\n", 1)[0].rpartition(" - ")[2])[:MESSAGE_MAX]
    return Unavailable(f"{what}: {why}", remedy=remedy)


def _port(uri: str) -> int:
    try:
        parts = urlsplit(uri)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # it is cut out of a text
        return 0


def proxy_for(uri: str) -> str:
    """The proxy that the environment names for an http(s) URL, without its password; empty where it
    is asked directly. As the HTTP client does it: HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, in either
    case; NO_PROXY has names, domains, addresses, networks and `*`."""
    try:
        parts, proxies = urlsplit(uri), getproxies_environment()
    except ValueError:  # it is cut out of a text
        return ""
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    host = (parts.hostname or "").lower()
    if not proxy or not host:
        return ""
    for entry in (each.strip().lower() for each in proxies.get("no", "").split(",")):
        if entry and (entry == "*" or host == entry.lstrip(".") or host.endswith("." + entry.lstrip("."))):
            return ""
        if "/" in entry and _within(host, entry):
            return ""
    return redacted(proxy if "://" in proxy else f"http://{proxy}")


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
