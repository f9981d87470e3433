"""What is shown, written down before it is: one JSON file for each mount in the work directory.

A process that starts later finds there what is shown, and what a crash left. The file `<id>.json`
belongs to the directory `<id>` beside it, which holds layer mount points and what programs wrote.
The record goes last, so that cleaning that fails half-way is taken up again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from p2pdist.mount import kernel
from p2pdist.mount.overlay import unmount_layers
from p2pdist.mount.removal import remove_tree

_ID = re.compile(r"[0-9a-f]{16}\Z")
_OWNER = re.compile(r"([0-9]{1,9}:[0-9]{1,18})?\Z")
_BYTES_MAX = 1 << 20
IMAGES = "images"
"""The `how` of images that are handed out: nothing is mounted."""


@dataclass(frozen=True, slots=True)
class Record:
    """One mount. `target` is a real path, or with `how` "images" the name under which images are
    handed out; `created` says that this mount made the directory; `staging` is where unpacking
    happens before it is renamed to `target`, and `inode` the number of that directory, by which it
    is known afterwards; `label` is free for the caller; `owner` is the process for which it was
    made, as holders.Process writes it, empty for a mount that stays until it is unmounted."""

    id: str
    target: str
    how: str
    images: tuple[str, ...]
    created: bool = False
    staging: str = ""
    inode: int = 0
    label: str = ""
    writable: bool = False
    owner: str = ""

    @property
    def source(self) -> str:
        """The name of this mount's overlay in mountinfo: it tells ours from others'."""
        return f"p2pdist:{self.id}"

    def directory(self, work: Path) -> Path:
        """Where layers are mounted."""
        return work / self.id


def new_id() -> str:
    return secrets.token_hex(8)


def save(record: Record, work: Path) -> None:
    """Write or replace the record, atomically and durably."""
    partial = work / f"{record.id}.partial"
    with partial.open("w") as file:
        json.dump(asdict(record), file)  # ASCII escapes carry names that are not UTF-8
        file.flush()
        os.fsync(file.fileno())
    partial.replace(work / f"{record.id}.json")


def _parse(path: Path) -> Record | None:
    try:
        with path.open() as file:
            fields = json.loads(file.read(_BYTES_MAX))
        record = Record(**{**fields, "images": tuple(fields["images"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    named = record.id == path.stem and _ID.match(record.id)
    return record if named and _OWNER.match(record.owner) else None


def records(work: Path) -> list[Record]:
    """All records of a work directory; files that are not records are left alone."""
    return [record for path in sorted(work.glob("*.json")) if (record := _parse(path)) is not None]


def is_ours(record: Record, entry: kernel.Mounted) -> bool:
    """Whether `entry`, found at the record's target, is this record's mount: our overlay, or a loop
    device over its image."""
    if entry.kind == "overlay":
        return entry.source == record.source
    return entry.kind == "squashfs" and kernel.backing_file(entry.source) in record.images


def is_whole(record: Record) -> bool:
    """Whether what the record says is there: False when its process was killed before it was done,
    or the machine has started anew."""
    if record.how == IMAGES:
        return bool(record.owner)
    target = Path(record.target)
    if record.inode:
        return _inode(target) == record.inode
    entry = kernel.mounted_at(target)
    return entry is not None and is_ours(record, entry)


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except OSError:
        return -1


def take_down(record: Record, work: Path, *, lazily: bool = False) -> None:
    """Undo everything of a record, and forget it. Repeating it is harmless. Raises OSError, EBUSY
    when the mount is in use."""
    target = Path(record.target)
    entry = kernel.mounted_at(target)
    if entry is not None and is_ours(record, entry):
        kernel.unmount_here(target, lazily=lazily)
        entry = kernel.mounted_at(target)
    unmount_layers(record.directory(work))
    if record.staging:
        remove_tree(Path(record.staging))
    if entry is None and record.inode and _inode(target) == record.inode:
        remove_tree(target, keep=not record.created)
    elif entry is None and record.created:
        with contextlib.suppress(OSError):  # it is gone, or holds something that is not ours
            target.rmdir()
    remove_tree(record.directory(work))
    (work / f"{record.id}.partial").unlink(missing_ok=True)
    (work / f"{record.id}.json").unlink(missing_ok=True)
