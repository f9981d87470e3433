"""Models, data sets and spaces of a Hugging Face hub: their names, what a commit consists of, and
what is refused.

A **hub** keeps repositories, which have branches, tags and commits as git has them. A commit names
files. Large ones are known by the SHA-256 of their content (git LFS), so each is a blob of ours
before a byte of it has come. Small ones are known by their git object id: the SHA-1 of their bytes
behind a head that says the length.

A repository is written as `hf://org/model`, `hf://datasets/org/name` or `hf://spaces/org/name`,
maybe with `@REVISION`. Policies and rights match `hf.co/` and what follows the scheme.

What a hub says becomes paths below a directory of its clients. So a commit with a file whose name
could lead elsewhere, or could hide something on a terminal, is refused whole: a copy without that
file would look complete.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal
from unicodedata import category

import msgspec
from msgspec import Meta

from p2pdist.model.address import on_this_machine
from p2pdist.model.digest import Digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, P2PDistError, Refused, UsageError, printable
from p2pdist.model.manifest import Reference

SCHEME = "hf://"
PREFIX = "hf.co/"
"""Begins the name under which policies and rights know a repository."""

MAIN = "main"
HUB_URL = "https://huggingface.co"
FILES_MAX = 200_000
LISTING_BYTES_MAX = 60 << 20
"""The listing of one commit as trackers send it."""

SMALL_BYTES_MAX = 16 << 20
"""A file that is not kept by LFS; hubs take none over 10 MB."""

FILE_BYTES_MAX = 1 << 50
PATH_BYTES_MAX = 2048
SEGMENT_BYTES_MAX = 255
REVISION_CHARACTERS_MAX = 255
URL_CHARACTERS_MAX = 512
TOKEN_CHARACTERS_MAX = 4096
CLIENT_HEADER = "P2pdist-Hub-Token"
"""The field in which an agent passes the token of its client on to its tracker."""

Kind = Literal["models", "datasets", "spaces"]
KINDS: tuple[Kind, ...] = ("models", "datasets", "spaces")

Code = Literal["RepoNotFound", "RevisionNotFound", "EntryNotFound", "GatedRepo"]
"""Why a hub answers with an error, in the field X-Error-Code."""

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+@=#-]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""

_URL = re.compile(
    r"https?://(?:[A-Za-z0-9.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[1-9][0-9]{0,4})?(?:/[A-Za-z0-9._~/-]*)?\Z"
)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+\Z")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of a hub. Made by `hub_name`, which checks it."""

    kind: Kind
    repository: str
    """Its owner and its name, or only its name."""

    @property
    def path(self) -> str:
        """How addresses of files name it: models without their kind."""
        return self.repository if self.kind == "models" else f"{self.kind}/{self.repository}"

    def __str__(self) -> str:
        return PREFIX + self.path


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository at a branch, tag or commit."""

    name: HubName
    revision: str = MAIN

    @property
    def package(self) -> Reference:
        """The repository as policies and rights see it: a package of its name."""
        return Reference(str(self.name), self.revision, None)

    def __str__(self) -> str:
        return f"{SCHEME}{self.name.path}@{self.revision}"


class HubFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a commit: its path, size in bytes, git object id, and where LFS keeps it the
    SHA-256 of its content in hexadecimal digits, else an empty text."""

    path: str
    size: Annotated[int, Meta(ge=0, le=FILE_BYTES_MAX)]
    oid: str
    sha256: str = ""

    @property
    def digest(self) -> Digest:
        """The blob that a file of LFS is."""
        assert self.sha256, "only files of LFS are blobs"
        return Digest(f"sha256:{self.sha256}")

    @property
    def etag(self) -> str:
        """The entity tag by which clients know the content."""
        return self.sha256 or self.oid


class HubDirectory(msgspec.Struct, frozen=True, array_like=True):
    """A directory of a commit: its path and git object id."""

    path: str
    oid: str


class HubListing(msgspec.Struct, frozen=True):
    """Everything in a commit, which never changes."""

    commit: str
    files: tuple[HubFile, ...]
    directories: tuple[HubDirectory, ...] = ()


class HubRevision(msgspec.Struct, frozen=True):
    """The commit that a branch, tag or commit names, and what the hub says of the repository
    there, a JSON object."""

    commit: str
    info: msgspec.Raw


class HubAdmission(msgspec.Struct, frozen=True):
    """A repository may be read. `open`: by every client, whatever it shows."""

    open: bool


class HubLocation(msgspec.Struct, frozen=True):
    """Where a file of LFS is read, and the address of the hub that says so."""

    url: str
    hub: str


def hub_name(kind: str, repository: str) -> HubName:
    """Raises UsageError for what no repository is called."""
    parts = repository.split("/")
    known = next((one for one in KINDS if one == kind), None)
    # A model of the owner `datasets` would be called what the data set of that name is.
    taken = known == "models" and len(parts) == 2 and parts[0] in KINDS
    if known is None or taken or len(parts) > 2 or not all(map(_SEGMENT.match, parts)) or ".." in repository:
        raise UsageError(
            f"{printable(repository)[:200]!r} is not the name of a repository of a hub",
            remedy="Write hf://ORG/NAME@REVISION",
        )
    return HubName(known, repository)


def is_commit(text: str) -> bool:
    """Whether a revision is a whole commit, which means the same for ever."""
    return _COMMIT.match(text) is not None


def check_revision(text: str) -> str:
    """Raises UsageError for what no branch, tag or commit is called."""
    if len(text) > REVISION_CHARACTERS_MAX or not _REVISION.match(text) or ".." in text or "//" in text:
        raise UsageError(f"{printable(text)[:100]!r} is not the name of a branch, tag or commit")
    return text


def check_path(path: str) -> str:
    """Raises UsageError for a path that would lead out of a directory, or that no file can have
    everywhere."""
    segments = path.split("/")
    try:
        lengths = [len(segment.encode()) for segment in segments]
    except UnicodeEncodeError:
        lengths = [0]
    bad = any(segment in ("", ".", "..") for segment in segments) or not 0 < max(lengths) <= SEGMENT_BYTES_MAX
    if bad or 0 in lengths or sum(lengths) > PATH_BYTES_MAX or "\\" in path or _hides(path):
        raise UsageError(f"{printable(path)[:200]!r} is no path of a file")
    return path


def _hides(path: str) -> bool:
    """Whether characters of a path control what shows it: a terminal, or the order of a text."""
    if path.isascii():
        return not path.isprintable()
    return any(category(each) in ("Cc", "Cs", "Zl", "Zp") or each in _BIDIRECTIONAL for each in path)


def check_token(token: str) -> str:
    """A client's token; "" for none. Raises UsageError, whose text does not show it."""
    if token and (len(token) > TOKEN_CHARACTERS_MAX or not _TOKEN.match(token)):
        raise UsageError("the token cannot be read", remedy="Send Authorization: Bearer and a token of the hub")
    return token


def check_listed(where: str, path: str) -> None:
    """Raises Refused for a path that a hub lists, and that names nothing within a directory."""
    try:
        check_path(path)
    except UsageError as error:
        raise Refused(
            f"{where} has a file that is refused: {error.what}", remedy="Ask its owner to rename the file"
        ) from error


def check_listing(name: HubName, listing: HubListing) -> HubListing:
    """What a hub lists, checked. Raises Refused for a commit that may not be written to a
    directory, Corrupt for what is none."""
    where = f"{name} at {listing.commit[:40]}"
    if len(listing.files) + len(listing.directories) > FILES_MAX:
        raise Refused(f"{where} has more than {FILES_MAX} files, which is over the limit")
    seen: set[str] = set()
    entries: tuple[HubFile | HubDirectory, ...] = (*listing.files, *listing.directories)
    for entry in entries:
        check_listed(where, entry.path)
        if entry.path in seen:
            raise Corrupt(f"{where} lists {printable(entry.path)[:200]} twice")
        seen.add(entry.path)
        if not _COMMIT.match(entry.oid):
            raise Corrupt(f"{where}: {printable(entry.path)[:200]} has no git object id")
        if isinstance(entry, HubFile) and entry.sha256 and not _SHA256.match(entry.sha256):
            raise Corrupt(f"{where}: {printable(entry.path)[:200]} has no SHA-256")
    if not is_commit(listing.commit):
        raise Corrupt(f"{name}: the hub names no commit")
    return listing


def git_oid(data: bytes) -> str:
    """The git object id of a file's content (gitformat-objects: a blob)."""
    head = b"blob %d\0" % len(data)
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()


def hub_url(text: str) -> str:
    """The address of a hub, without a slash at its end. Plain HTTP is spoken to this machine, and
    where the address says so. Raises UsageError."""
    url = text.strip().rstrip("/")
    if url and "://" not in url:
        url = f"{'http' if on_this_machine(url.partition(':')[0]) else 'https'}://{url}"
    if not _URL.match(url) or len(url) > URL_CHARACTERS_MAX:
        raise UsageError(
            f"{printable(text.rpartition('@')[2])[:100]!r} is not the address of a hub",
            remedy=f"Write {HUB_URL}, or the address of a mirror of it, without credentials",
        )
    return url


def is_hub(text: str) -> bool:
    """Whether a reference names a repository of a hub."""
    return text.startswith(SCHEME)


def parse_hub(text: str) -> HubReference:
    """The repository that `hf://...` names; without a revision at its main branch. Raises
    UsageError."""
    rest, _, revision = text.removeprefix(SCHEME).partition("@")
    first, slash, after = rest.partition("/")
    kind, repository = (first, after) if slash and first in KINDS else ("models", rest)
    return HubReference(hub_name(kind, repository), check_revision(revision or MAIN))


def failure(error: P2PDistError, code: Code | None, status: int, message: str = "") -> P2PDistError:
    """The same failure with what a hub says of it to its clients."""
    stated = {"hub_code": code, "hub_status": status, "hub_message": message}
    error.details |= {key: value for key, value in stated.items() if value}
    return error


def decode_listing(data: bytes) -> HubListing:
    """A listing as trackers send and hosts keep it. Raises Corrupt."""
    try:
        return msgspec.json.decode(data, type=HubListing)
    except UNDECODABLE as error:
        raise Corrupt(f"a listing of a commit is malformed: {' '.join(str(error).split())[:200]}") from error
