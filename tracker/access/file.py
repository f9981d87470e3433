"""The access file: roles, join tokens and namespaces of a fleet, in TOML.

An operator writes it; the tracker makes one where none is. It holds no secret: keys and join tokens
are files beside it (tracker/access/directory.py).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

import msgspec

from p2pdist.credentials.authority import check_fleet
from p2pdist.credentials.tokens import check_name
from p2pdist.files import decoded
from p2pdist.model.access import EVERYTHING, MIRROR_SUBJECT, NOTHING, LocalRules, Patterns, Role, RoleDocument
from p2pdist.model.errors import NotFound, UsageError
from tracker.networks import NETWORKS_MAX, Network

BYTES_MAX = 1 << 20
JOINS_MAX = 100
ROLES_MAX = 100
REVOKED_MAX = 10_000
SUBJECTS_MAX = 1000
MOUNT_ROOTS_MAX = 100
ZONES_MAX = 256
AUTHORITY_FILES_MAX = 8
SEALED_MAX = 1000

_JOIN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_SHA256 = re.compile(r"(?:[0-9a-f]{64})?\Z")
_REVOKED = re.compile(r"(?:host|token|join):[^\s\x00-\x1f\x7f-\x9f]{1,255}\Z")
_SUBJECT = re.compile(r"(?:user|group):[^\s\x00-\x1f\x7f-\x9f]{1,255}\Z")
_MOUNT_ROOTS = "mount-roots"

TEMPLATE = """\
# Access of this fleet. The tracker reads this file again when it changes.
# Patterns of packages: "team/trainer", "team/*" for all below team, "*" for everything.

fleet = "p2pdist"           # the fleet's name, in certificates and tokens
networks = []               # where agents may be beside the address they connect from, such as "10.0.0.0/8"
public = []                 # packages that need no ticket, and that BitTorrent clients may fetch
revoked = []                # such as "host:r17n04", "token:7f3a0c..." or "join:default"

# A host joins with the file join-NAME.token beside this file (p2pdist agent --join-file).
[join.default]
read = ["*"]                # packages that these hosts may receive
zones = []                  # zones that they may say they are in; none: any

# Rights: preseed, rank, cancel-any, watch, metrics, trackers, hosts. p2pdist token create --role NAME makes tokens.
[role.scheduler]
may = ["preseed", "rank"]
read = ["*"]

[role.operator]
may = ["preseed", "rank", "cancel-any", "watch", "metrics", "trackers", "hosts"]
read = ["*"]

[role.metrics]
may = ["metrics"]

[role.reader]
read = ["*"]

# What processes at an agent's Unix socket may use. Without this table its group may use everything.
# [local]
# "group:team-a" = ["team-a/*"]
# "group:p2pdist" = ["*"]
# "mirror" = ["docker.io/*"]  # whatever process asks the agent's mirror on loopback
# mount-roots = ["/run/p2pdist", "/srv"]

# Agents with certificates of another authority, such as those of cert-manager or SPIRE.
# [certificates]
# authorities = ["ca.pem"]  # files beside this one
# read = ["*"]

# Packages that hosts may decrypt (p2pdist push --encrypt-to). p2pdist key create NAME makes a key and prints
# its recipient; with identity-command a command prints the identity, such as one that asks a KMS for it.
# [sealed."team-a/*"]
# key = "team-a"
# required = true             # hosts get no package of it that is not encrypted
# [sealed."team-b/*"]
# identity-command = ["/usr/local/bin/kms-decrypt", "/etc/p2pdist/team-b.identity.enc"]

# People with tokens of an OpenID Connect issuer: a claim's value gives a role.
# [oidc]
# issuer = "https://issuer.example"
# audience = "p2pdist"
# map = { groups = { ml-team = "scheduler" } }
"""


class JoinDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One join token as the access file states it. `secret_sha256`: the hash of its secret, where
    the token itself is kept elsewhere; else it is in the file join-NAME.token."""

    read: tuple[str, ...] = ("*",)
    zones: tuple[str, ...] = ()
    secret_sha256: str = ""


class CertificatesDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agents with certificates of another authority: what they may. `authorities` are files
    in PEM, by their names in the directory of the access file."""

    authorities: tuple[str, ...]
    read: tuple[str, ...] = ("*",)
    zones: tuple[str, ...] = ()


class SealedDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One namespace of sealed packages: its key is in files of the access directory (`key`), or a
    command prints its age identities, the present one first. `required`: hosts get no other
    packages of the namespace."""

    key: str = ""
    identity_command: tuple[str, ...] = ()
    required: bool = False


class OidcDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer of OpenID Connect. `map`: roles by the value of a claim, by the claim's name."""

    issuer: str
    audience: str
    map: dict[str, dict[str, str]]


class AccessDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The access file."""

    fleet: str
    networks: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    join: dict[str, JoinDocument] = {}
    role: dict[str, RoleDocument] = {}
    local: dict[str, tuple[str, ...]] = {}
    certificates: CertificatesDocument | None = None
    oidc: OidcDocument | None = None
    sealed: dict[str, SealedDocument] = {}


@dataclass(frozen=True, slots=True)
class JoinRule:
    """What a host may that came with one join token."""

    read: Patterns = EVERYTHING
    zones: tuple[str, ...] = ()
    secret_sha256: str = ""


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The access file, checked."""

    fleet: str
    networks: tuple[Network, ...] = ()
    public: Patterns = NOTHING
    revoked: frozenset[str] = frozenset()
    joins: Mapping[str, JoinRule] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    local: LocalRules = field(default_factory=LocalRules)
    oidc: OidcDocument | None = None
    certificates: JoinRule | None = None
    """What hosts with certificates of another authority may."""
    authority_files: tuple[str, ...] = ()
    sealed: Mapping[str, SealedDocument] = field(default_factory=dict)
    """The namespaces of sealed packages, by pattern."""

    def requires_sealed(self, name: str) -> bool:
        """Whether packages of this name must be sealed."""
        return bool(self.sealed) and any(
            rule.required for pattern, rule in self.sealed.items() if Patterns((pattern,)).match(name)
        )

    def namespace(self, name: str) -> str:
        """The pattern of the namespace whose key opens packages of this name: the longest that
        matches. Raises NotFound."""
        found = [pattern for pattern in self.sealed if Patterns((pattern,)).match(name)]
        if not found:
            raise NotFound(
                f"no key opens packages named {name}",
                remedy="Add a table [sealed] for it to the tracker's access file: p2pdist key create makes a key",
            )
        return max(found, key=lambda pattern: len(pattern.removesuffix("*")))


def read_rules(data: bytes, where: str) -> AccessRules:
    """The rules in an access file; `where` names it. Raises UsageError for the first mistake."""
    if len(data) > BYTES_MAX:
        raise UsageError(f"{where} has more than {BYTES_MAX} bytes", remedy="Name an access file")
    try:
        document = msgspec.convert(tomllib.loads(decoded(data)), AccessDocument)
        return _checked(document)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"the access file {where} cannot be used: {said}", remedy="Correct that place") from error
    except UsageError as error:
        raise UsageError(f"the access file {where} cannot be used: {error.what}", remedy=error.remedy) from error


def check_revoked(entry: str) -> str:
    """Raises UsageError for what cannot be revoked."""
    if not _REVOKED.match(entry):
        raise UsageError(f"{entry[:80]!r} cannot be revoked", remedy="Write host:NAME, token:ID or join:ID")
    return entry


def _checked(document: AccessDocument) -> AccessRules:
    for what, count, most in (
        ("networks", len(document.networks), NETWORKS_MAX),
        ("revoked", len(document.revoked), REVOKED_MAX),
        ("join", len(document.join), JOINS_MAX),
        ("role", len(document.role), ROLES_MAX),
        ("local", len(document.local), SUBJECTS_MAX),
        ("sealed", len(document.sealed), SEALED_MAX),
    ):
        if count > most:
            raise UsageError(f"{what} has {count} entries, more than {most}")
    return AccessRules(
        check_fleet(document.fleet),
        tuple(map(_network, document.networks)),
        Patterns.parse(document.public, "public"),
        frozenset(map(check_revoked, document.revoked)),
        {name: _join(name, rule) for name, rule in document.join.items()},
        {check_name(name, "the name of a role"): Role.parse(name, role) for name, role in document.role.items()},
        _local(document.local),
        _oidc(document),
        *_certificates(document.certificates),
        _sealed(document),
    )


def _sealed(document: AccessDocument) -> Mapping[str, SealedDocument]:
    public = Patterns.parse(document.public, "public")
    keys = [rule.key for rule in document.sealed.values() if rule.key]
    commands = [rule.identity_command for rule in document.sealed.values() if rule.identity_command]
    for pattern, rule in document.sealed.items():
        own = Patterns.parse((pattern,), "sealed")
        if public.contains(pattern) or any(map(own.contains, document.public)):
            raise UsageError(
                f"sealed {pattern!r}: packages there are public, which anybody may receive",
                remedy="Take it out of public, or do without encryption there",
            )
        if bool(rule.key) == bool(rule.identity_command):
            raise UsageError(f"sealed {pattern!r}: it has either a key or an identity-command")
        if rule.key and not _JOIN.match(rule.key):
            raise UsageError(
                f"sealed {pattern!r}: {rule.key[:80]!r} cannot be the name of a key",
                remedy="Use lower-case letters, digits and dashes",
            )
        if rule.key and keys.count(rule.key) > 1:
            raise UsageError(
                f"sealed {pattern!r}: another namespace has the key {rule.key}, too",
                remedy="Give each its own: a host that reads one of them could open the other",
            )
        if commands.count(rule.identity_command) > 1:
            raise UsageError(
                f"sealed {pattern!r}: another namespace has the same identity-command",
                remedy="Have each print an identity of its own: a host that reads one could open the other",
            )
        if rule.identity_command and not rule.identity_command[0].startswith("/"):
            raise UsageError(f"sealed {pattern!r}: the command is no absolute path")
    return document.sealed


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise UsageError(f"networks: {error}", remedy='Write such as "10.0.0.0/8"') from error


def _join(name: str, document: JoinDocument) -> JoinRule:
    if not _JOIN.match(name):
        raise UsageError(
            f"{name[:80]!r} cannot be the id of a join token", remedy="Use lower-case letters, digits and dashes"
        )
    if not _SHA256.match(document.secret_sha256):
        raise UsageError(f"join {name}: secret_sha256 is no SHA-256 in hexadecimal digits")
    if len(document.zones) > ZONES_MAX or not all(document.zones):
        raise UsageError(f"join {name}: zones are up to {ZONES_MAX} names")
    return JoinRule(Patterns.parse(document.read, f"join {name}"), document.zones, document.secret_sha256)


def _certificates(document: CertificatesDocument | None) -> tuple[JoinRule | None, tuple[str, ...]]:
    if document is None:
        return None, ()
    if not 0 < len(document.authorities) <= AUTHORITY_FILES_MAX or any("/" in name for name in document.authorities):
        raise UsageError(f"certificates: authorities are 1 to {AUTHORITY_FILES_MAX} files beside the access file")
    return _join("certificates", JoinDocument(document.read, document.zones)), document.authorities


def _local(document: Mapping[str, tuple[str, ...]]) -> LocalRules:
    roots = document.get(_MOUNT_ROOTS, ())
    if len(roots) > MOUNT_ROOTS_MAX or not all(root.startswith("/") and ".." not in root.split("/") for root in roots):
        raise UsageError(f"local: {_MOUNT_ROOTS} are up to {MOUNT_ROOTS_MAX} absolute paths")
    by_subject: dict[str, Patterns] = {}
    for subject, patterns in document.items():
        if subject == _MOUNT_ROOTS:
            continue
        if subject != MIRROR_SUBJECT and not _SUBJECT.match(subject):
            raise UsageError(
                f"local: {subject[:80]!r} is no local user", remedy="Write user:NAME, group:NAME or mirror"
            )
        by_subject[subject] = Patterns.parse(patterns, f"local {subject}")
    return LocalRules(by_subject, roots)


def _oidc(document: AccessDocument) -> OidcDocument | None:
    oidc = document.oidc
    if oidc is None:
        return None
    loopback = re.match(r"http://(?:127\.0\.0\.1|localhost|\[::1\])[:/]", oidc.issuer)
    if not oidc.issuer.startswith("https://") and not loopback:
        raise UsageError("oidc: the issuer is no https:// URL")
    for roles in oidc.map.values():
        for role in roles.values():
            if role not in document.role:
                raise UsageError(f"oidc: there is no role {role[:80]!r}", remedy=f"Add a table [role.{role[:80]}]")
    return oidc
