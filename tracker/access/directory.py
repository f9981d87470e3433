"""The directory of an access file: a fleet's authorities, signing keys and join tokens.

Beside the access file lie, mode 0600:

- `authority-CREATED.pem` and `.key`: an authority; `signing-CREATED-NAME.pem`: a signing key. The
  newest of each issues, and the others are trusted until SUPERSEDED_S after the next newer one was
  made. CREATED is a time, UTC, which may be one to come where a clock was ahead.
- `sealed-NAME-CREATED.key`: an age identity of the key NAME, which opens sealed packages of a
  namespace. The newest is the recipient of pushes; the others open what was pushed before.
- `join-ID.token`: the join token of the table [join.ID].
- `revoked.txt`: what `p2pdist access revoke` wrote, a line each. `tokens.jsonl`: a line for each
  token that was made, without the token.

Several trackers of a fleet have the same directory, or copies of it: it may be read-only, such as a
Secret of Kubernetes, when everything is there.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2pdist.credentials.authority import Authority, encode_key, names_authority, split_pem
from p2pdist.credentials.join import JoinToken
from p2pdist.credentials.signing import SigningKey
from p2pdist.credentials.tokens import TokenRecord
from p2pdist.encryption import identities_in, new_identity
from p2pdist.files import read_content
from p2pdist.model.errors import UNDECODABLE, NotFound, P2PDistError, Refused, UsageError, foreseen
from p2pdist.model.messages import AUTHORITIES_BYTES_MAX
from tracker.access.file import REVOKED_MAX, TEMPLATE, AccessRules, JoinRule, check_revoked, read_rules

SUPERSEDED_S = 48 * 3600.0
"""How long a key is trusted after the next newer one was made."""

FILE_BYTES_MAX = 1 << 20
TOKENS_BYTES_MAX = 64 << 20
KEYS_MAX = 8
"""Authorities, and signing keys, that are read."""

_MISSING = "Name the tracker's access file with --access; a tracker that is started with it makes one"
SECRET_FILES = ("authority-", "signing-", "join-", "sealed-")
REVOKED_FILE = "revoked.txt"
TOKENS_FILE = "tokens.jsonl"
_TIME = "%Y%m%dT%H%M%SZ"
_AUTHORITY = re.compile(r"authority-(\d{8}T\d{6}Z)\.pem\Z")
_SEALED = r"sealed-%s-(\d{8}T\d{6}Z)\.key\Z"
_SIGNING = re.compile(r"signing-(\d{8}T\d{6}Z)-[0-9a-f]{16}\.pem\Z")

Stamp = tuple[tuple[str, int, int, int], ...]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AccessState:
    """The access file and the keys beside it, as they are now."""

    rules: AccessRules
    """With the hashes of all join secrets, and all that is revoked."""
    authorities: tuple[Authority, ...]
    """The fleet's authorities that are trusted, the newest first."""
    signing: tuple[SigningKey, ...]
    """Keys that make good signatures, the newest first."""
    bundle: bytes
    """The certificates of the authorities, PEM."""
    introduction: bytes
    """Leads from the newest authority to the one before it, PEM; empty where there is one."""
    others: bytes = b""
    """Certificates, PEM, of other authorities whose certificates agents may have."""
    listed: frozenset[str] = frozenset()
    """What is revoked by REVOKED_FILE."""

    @property
    def trusted(self) -> bytes:
        """The certificates, PEM, of all authorities whose certificates agents may have."""
        return self.bundle + self.others

    @property
    def public_keys(self) -> Mapping[str, str]:
        """The public halves of the signing keys by name."""
        return {key.name: key.public for key in self.signing}

    def chain(self, certificate: bytes) -> bytes:
        """A certificate of the newest authority, and what leads from it to the one before it, for
        peers that know only that one; else the authority's own. A chain that is given is sent as it
        is. Where there is none, OpenSSL verifies its owner's certificate in each handshake to find
        one, which is a tenth of the work of either end."""
        return certificate + (self.introduction or self.authorities[0].pem)


class _Files:
    """Reads and writes files of one directory. Raises P2PDistError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def text(self, path: Path) -> str:
        """A file of text."""
        return self.read(path).decode(errors="replace")

    def read(self, path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
        """A file as a whole; warns of a secret that others may read."""
        with self.failures(path):
            data, mode = read_content(path, bytes_max)
        if len(data) > bytes_max:
            raise UsageError(f"{path} has more than {bytes_max} bytes")
        if mode & 0o077 and path.name.startswith(SECRET_FILES):
            logger.warning("%s may be read by others than its owner: chmod 600 it", path)
        return data

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file as a whole, mode 0600."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with self.failures(path):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.opened(temporary, os.O_TRUNC) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def opened(self, path: Path, flags: int) -> BinaryIO:
        """A file for writing, mode 0600. What root makes belongs to the owner of the directory: the
        tracker must read it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o600)
        if os.geteuid() == 0:
            owner = self.directory.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return open(descriptor, "wb")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time makes files."""
        with self.failures(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def failures(self, path: Path) -> Iterator[None]:
        """What the system says of `path`, as failures that users understand."""
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}", remedy=_MISSING) from error
        except OSError as error:
            raise foreseen(error, str(path)) or P2PDistError(f"{path} cannot be used: {error.strerror}") from error


class AccessDirectory:
    """The access file at `path`, and what lies beside it. Methods wait for the disk, and raise
    P2PDistError for files that cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.directory = self.path.parent
        self._files = _Files(self.directory)

    def prepare(self, *, now: float) -> list[Path]:
        """Make what is missing, as a tracker starts; returns the join tokens that were made."""
        if self._missing():
            with self._files.locked():
                return self._make(now)
        return []

    def add_tokens(self, *, now: float) -> list[Path]:
        """Make the join tokens of tables that have none, and nothing else: where a tracker runs, an
        access file or a key that is missing was there before, and is not to be replaced. Returns
        those that were made."""
        if any(_lacks(self.join_token(name), rule) for name, rule in self.rules().joins.items()):
            with self._files.locked():
                return self._make_tokens(self.rules(), now)
        return []

    def load(self, *, now: float, before: AccessState | None = None) -> AccessState:
        """Read everything. `now`: seconds since the epoch. Where REVOKED_FILE is gone, what it held
        `before` stays revoked: commands empty it and never remove it."""
        rules = self.rules()
        authorities = [self._authority(path, rules.fleet) for path in _trusted(self._named(_AUTHORITY), now)]
        signing = [SigningKey.load(self._files.read(path)) for path in _trusted(self._named(_SIGNING), now)]
        if not authorities or not signing:
            raise _no_keys(self.directory)
        joins = {name: self._with_secret(name, rule) for name, rule in rules.joins.items()}
        listed = frozenset(self.revoked(before.listed if before is not None else ()))
        revoked = rules.revoked | listed
        if len(revoked) > REVOKED_MAX:
            raise UsageError(f"{len(revoked)} entries are revoked, more than {REVOKED_MAX}")
        rules = replace(rules, joins=joins, revoked=revoked)
        introduction = authorities[1].introduce(authorities[0], now=now) if len(authorities) > 1 else b""
        bundle = b"".join(authority.pem for authority in authorities)
        others = b"".join(self._others(name, rules.fleet) for name in rules.authority_files)
        if (size := len(bundle) + len(others)) > AUTHORITIES_BYTES_MAX:  # the session of each would end at it
            raise UsageError(
                f"the certificates in {', '.join(rules.authority_files)} and of the fleet's own authorities have {size} "
                f"bytes, and agents take {AUTHORITIES_BYTES_MAX}",
                remedy="Name files of the authorities that issue agents' certificates, not of all that a system trusts",
            )
        return AccessState(rules, tuple(authorities), tuple(signing), bundle, introduction, others, listed)

    def stamp(self) -> Stamp:
        """What changes with any of the files."""
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                if entry.name != TOKENS_FILE and not entry.name.startswith("."):
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        found.append((entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(sorted(found))

    def join_token(self, name: str) -> Path:
        """Where a join token is."""
        return self.directory / f"join-{name}.token"

    # -- what operators do

    def rotate(self, *, now: float) -> list[str]:
        """Make a new authority and signing key, and remove the ones that are trusted no longer;
        returns the names of the files that were removed."""
        with self._files.locked():
            self.load(now=now)
            rules = self.rules()
            newest = self._new_authority(rules.fleet, now)
            self._new_signing_key(now)
            for name in rules.joins:
                with contextlib.suppress(NotFound):
                    token = replace(JoinToken.parse(self._files.text(self.join_token(name))), pin=newest.fingerprint)
                    self._files.write(self.join_token(name), f"{token}\n".encode())
            removed = []
            for kind in (_AUTHORITY, _SIGNING):
                named = self._named(kind)
                for path in set(named.values()) - set(_trusted(named, now)):
                    path.unlink()
                    path.with_suffix(".key").unlink(missing_ok=True)
                    removed.append(path.name)
            return sorted(removed)

    def revoked(self, before: Iterable[str] = ()) -> list[str]:
        """What `revoke` wrote; what it wrote `before`, where the file is gone."""
        path, before = self.directory / REVOKED_FILE, list(before)
        try:
            lines = self._files.text(path).splitlines()
        except NotFound:
            if before:
                logger.warning("%s is gone: what it revoked stays revoked", path)
            return before
        return [check_revoked(line.strip()) for line in lines if line.strip() and not line.startswith("#")]

    def set_revoked(self, entries: Iterable[str]) -> None:
        """These are revoked from now on, beside those in the access file."""
        self.change_revoked(lambda _: entries)

    def change_revoked(self, change: Callable[[list[str]], Iterable[str]]) -> None:
        """What `change` makes of what `revoke` wrote is revoked from now on; two such changes at
        once come one after the other. Raises NotFound where no access file is here, so that nothing
        would be revoked, and UsageError for more than a tracker takes."""
        in_file = self.rules().revoked
        with self._files.locked():
            before = self.revoked()
            entries = tuple(dict.fromkeys(map(check_revoked, change(before))))
            if (count := len(in_file | set(entries))) > REVOKED_MAX and len(entries) > len(before):
                raise UsageError(
                    f"{count} entries would be revoked, more than the {REVOKED_MAX} that a tracker takes: nothing changed",
                    remedy="Unrevoke hosts and tokens that are gone, or take join tokens out of the access file",
                )
            self._files.write(self.directory / REVOKED_FILE, "".join(f"{entry}\n" for entry in entries).encode())

    def tokens(self) -> list[TokenRecord]:
        """The tokens that were made, the oldest first."""
        path = self.directory / TOKENS_FILE
        try:
            data = self._files.read(path, TOKENS_BYTES_MAX)
        except NotFound:
            return []
        try:
            return [msgspec.json.decode(line, type=TokenRecord) for line in data.splitlines() if line.strip()]
        except UNDECODABLE as error:
            raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error

    def note_token(self, record: TokenRecord) -> None:
        """Keep what is known of a new token."""
        path = self.directory / TOKENS_FILE
        line = msgspec.json.encode(record) + b"\n"
        with self._files.locked(), self._files.failures(path), self._files.opened(path, os.O_APPEND) as file:
            before = os.fstat(file.fileno()).st_size
            if os.write(file.fileno(), line) < len(line):  # half a line would spoil the next one, and the list
                os.ftruncate(file.fileno(), before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    # -- keys of sealed packages

    def rules(self) -> AccessRules:
        """The access file."""
        return read_rules(self._files.read(self.path), str(self.path))

    def key_names(self) -> list[str]:
        """The keys that have files here."""
        with self._files.failures(self.directory):
            names = os.listdir(self.directory)
        matches = (re.match(_SEALED % "([a-z0-9][a-z0-9-]{0,62})", name) for name in names)
        return sorted({match[1] for match in matches if match is not None})

    def identities(self, key: str) -> tuple[str, ...]:
        """The age identities of a key, the newest first. Raises NotFound."""
        named = self._named(re.compile(_SEALED % re.escape(key)))
        if not named:
            raise NotFound(f"there is no key {key} beside {self.path}", remedy=f"p2pdist key create {key} makes it")
        files = [self._files.text(named[at]) for at in sorted(named, reverse=True)]
        return tuple(identity for text in files for identity in identities_in(text))

    def new_identity(self, key: str, *, now: float) -> str:
        """Make a key, or another identity of it; returns its recipient. Raises UsageError."""
        if not re.match(r"[a-z0-9][a-z0-9-]{0,62}\Z", key):
            raise UsageError(f"{key[:80]!r} cannot be a key", remedy="Use lower-case letters, digits and dashes")
        with self._files.locked():
            created = _stamp(_newer_than(self._named(re.compile(_SEALED % re.escape(key))), now))
            identity, recipient = new_identity()
            text = f"# public key: {recipient}\n{identity}\n"
            self._files.write(self.directory / f"sealed-{key}-{created}.key", text.encode())
        return recipient

    # -- making

    def _missing(self) -> bool:
        if not self.path.exists() or not self._named(_AUTHORITY) or not self._named(_SIGNING):
            return True
        return any(_lacks(self.join_token(name), rule) for name, rule in self.rules().joins.items())

    def _make(self, now: float) -> list[Path]:
        if not self.path.exists():
            self._files.write(self.path, TEMPLATE.encode())
        rules = self.rules()
        if not self._named(_AUTHORITY):
            self._new_authority(rules.fleet, now)
        if not self._named(_SIGNING):
            self._new_signing_key(now)
        return self._make_tokens(rules, now)

    def _make_tokens(self, rules: AccessRules, now: float) -> list[Path]:
        trusted = _trusted(self._named(_AUTHORITY), now)
        if not trusted:
            raise _no_keys(self.directory)
        pin = self._authority(trusted[0], rules.fleet).fingerprint
        made = []
        for name, rule in rules.joins.items():
            if _lacks(self.join_token(name), rule):
                self._files.write(self.join_token(name), f"{JoinToken.create(pin, name)}\n".encode())
                made.append(self.join_token(name))
        return made

    def _new_authority(self, fleet: str, now: float) -> Authority:
        path = self.directory / f"authority-{_stamp(_newer_than(self._named(_AUTHORITY), now))}.pem"
        authority = Authority.create(fleet, now=now)
        self._files.write(path.with_suffix(".key"), encode_key(authority.key))
        self._files.write(path, authority.pem)
        return authority

    def _new_signing_key(self, now: float) -> None:
        key, created = SigningKey.create(), _stamp(_newer_than(self._named(_SIGNING), now))
        self._files.write(self.directory / f"signing-{created}-{key.name}.pem", key.pem)

    # -- files

    def _with_secret(self, name: str, rule: JoinRule) -> JoinRule:
        if rule.secret_sha256:
            return rule
        token = JoinToken.parse(self._files.text(self.join_token(name)))
        if token.id != name:
            raise UsageError(f"{self.join_token(name)} holds the join token {token.id!r}")
        return replace(rule, secret_sha256=token.secret_sha256)

    def _others(self, name: str, fleet: str) -> bytes:
        """The authorities in a file. Raises UsageError, also for one with the name of the fleet's
        own: what that one issues would be taken for the fleet's."""
        path = self.directory / name
        data = self._files.read(path)
        try:
            plain = b"".join(split_pem(data))
        except Refused as error:
            raise UsageError(f"{path} holds no certificates in PEM") from error
        if names_authority(plain, fleet):
            raise UsageError(f"an authority in {path} has the name of the fleet's own", remedy="Give the fleet another")
        return plain

    def _authority(self, path: Path, fleet: str) -> Authority:
        return Authority.load(fleet, self._files.read(path), self._files.read(path.with_suffix(".key")))

    def _named(self, pattern: re.Pattern[str]) -> dict[float, Path]:
        """The files whose names match, by the time in them."""
        with self._files.failures(self.directory):
            names = os.listdir(self.directory) if self.directory.exists() else []
        matches = (match for match in map(pattern.match, names) if match is not None)
        return {_seconds(match[1]): self.directory / match[0] for match in matches}


def _lacks(token: Path, rule: JoinRule) -> bool:
    """Whether there is no join token of a table that states no hash of one."""
    return not rule.secret_sha256 and not token.exists()


def _no_keys(directory: Path) -> UsageError:
    return UsageError(
        f"{directory} lacks an authority or a signing key",
        remedy="Start the tracker where it may make them, or bring back those that it had",
    )


def _stamp(at: float) -> str:
    return time.strftime(_TIME, time.gmtime(at))


def _seconds(stamp: str) -> float:
    """Raises UsageError for what is no time."""
    try:
        return float(calendar.timegm(time.strptime(stamp, _TIME)))
    except ValueError as error:
        raise UsageError(f"{stamp} in the name of a key is no time", remedy="Rename or remove that file") from error


def _newer_than(named: Mapping[float, Path], now: float) -> float:
    """The time in the name of a new file, which is to be the newest of its kind: some may have been
    made while the clock was ahead."""
    return max([now, *(at + 1.0 for at in named)])


def _trusted(named: Mapping[float, Path], now: float) -> list[Path]:
    """The newest, and those that were not superseded SUPERSEDED_S ago; the newest first."""
    times = sorted(named, reverse=True)
    made = list(accumulate((_made_at(at, named[at], now) for at in times), min))  # each before all newer ones
    kept = [at for number, at in enumerate(times) if not number or now - made[number - 1] <= SUPERSEDED_S]
    return [named[at] for at in kept[:KEYS_MAX]]


def _made_at(at: float, path: Path, now: float) -> float:
    """When a file with this time in its name was made. Where the time is still to come, since a
    clock was ahead when it or the one before it was made, its last change tells."""
    if at > now:
        with contextlib.suppress(OSError):
            return min(at, path.stat().st_mtime)
    return at
