"""What was installed on a host, and what its files said before: `/etc/p2pdist/mirror.json`.

The record is written before the files are. A file that is still as it was written becomes again
what it was, byte for byte; one that was edited since loses what is ours, and nothing else.
"""

from __future__ import annotations

import hashlib

import msgspec

from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.model.errors import UNDECODABLE, Corrupt

RECORD = "/etc/p2pdist/mirror.json"
RECORD_MODE = 0o600
"""A file of a runtime may hold passwords of proxies, and so does the record of it."""


class Installation(msgspec.Struct, frozen=True):
    """One runtime that asks the mirror."""

    address: str
    """The mirror's URL, without a path."""
    upstreams: tuple[str, ...]
    certs_dir: str = ""
    """Where its hosts.toml files are, when that was given."""


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that was written."""

    before: str | None
    """Its text before; None when there was no such file."""
    wrote: str
    """SHA-256 of the text that was written."""


class Record(msgspec.Struct, frozen=True):
    """Runtimes by their names, files by their paths."""

    runtimes: dict[str, Installation] = {}
    files: dict[str, WrittenFile] = {}
    directories: tuple[str, ...] = ()
    """The directories that were made for these files and the record."""

    @property
    def addresses(self) -> set[str]:
        """Every mirror that some runtime asks."""
        return {installation.address for installation in self.runtimes.values()}


def text_digest(text: str) -> str:
    """What `WrittenFile.wrote` says of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def load_record(files: HostFiles) -> Record:
    """Empty where nothing was installed. Raises Corrupt, Refused, P2PDistError."""
    text = files.read(RECORD)
    if text is None:
        return Record()
    try:
        return msgspec.json.decode(text, type=Record)
    except UNDECODABLE as error:
        raise Corrupt(
            f"{RECORD} is not a record of this command: {error}",
            remedy="Move it away; what was installed is then to be taken away by hand (lines between `p2pdist mirror` comments)",
        ) from error


def save_record(files: HostFiles, record: Record) -> Record:
    """Write it, and return it with the directories that were made for it; remove it when it says
    nothing. Directories of it that are empty go. Raises Refused, P2PDistError."""
    if not record.runtimes and not record.files:
        files.remove(RECORD)
        files.remove_directories(record.directories)
        return Record()
    left = files.remove_directories(record.directories)
    record = msgspec.structs.replace(record, directories=tuple(left))
    made = files.write(RECORD, _text(record), mode=RECORD_MODE)
    if made:
        record = msgspec.structs.replace(record, directories=(*left, *made))
        files.write(RECORD, _text(record), mode=RECORD_MODE)
    return record


def _text(record: Record) -> str:
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"
