"""What is shown, written down before it is: one JSON file for each mount in the work directory.

Whoever starts after a crash finds there what to clean up. The file `<id>.json` belongs to the directory `<id>` beside it, which holds
layer mount points and what programs wrote. The record goes last, so that cleaning that fails half-way is taken up again.
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
_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One mount. `target` is a real path; `created` says that this mount made the directory; `staging` is where unpacking happens
    before it is renamed to `target`, and `inode` the number of that directory, by which it is known afterwards; `label` is free for
    the caller."""

    id: str
    target: str
    how: str
    images: tuple[str, ...]
    created: bool = False
    staging: str = ""
    inode: int = 0
    label: str = ""

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
    return record if record.id == path.stem and _ID.match(record.id) else None


def records(work: Path) -> list[Record]:
    """All records of a work directory; files that are not records are left alone."""
    return [record for path in sorted(work.glob("*.json")) if (record := _parse(path)) is not None]


def is_ours(record: Record, entry: kernel.Mounted) -> bool:
    """Whether `entry`, found at the record's target, is this record's mount: our overlay, or a loop device over its image."""
    if entry.kind == "overlay":
        return entry.source == record.source
    return entry.kind == "squashfs" and kernel.backing_file(entry.source) in record.images


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except OSError:
        return -1


def take_down(record: Record, work: Path, *, lazily: bool = False) -> None:
    """Undo everything of a record, and forget it. Repeating it is harmless. Raises OSError, EBUSY when the mount is in use."""
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
