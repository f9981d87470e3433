"""The check of a scanned source before an image is made of it: how much there is, what an image
cannot carry, and what cannot be read."""

from __future__ import annotations

import errno
import os
import stat

from p2pdist.model.errors import UsageError, printable
from p2pdist.package.image.squashfs import MTIME_MAX
from p2pdist.package.source.scan import (
    CAPABILITIES,
    EXECUTABLE,
    KINDS_DROPPED,
    Row,
    Scan,
    TreeScan,
    changed,
    has_capabilities,
    is_opaque,
    unreadable,
)

_MTIME_END_NS = (MTIME_MAX + 1) * 1_000_000_000


def preflight(scan: TreeScan, *, times_kept: bool = False, whiteouts: bool = False) -> Scan:
    """Count the entries of a scan. An image on top of others carries `whiteouts`, character devices
    0/0 that hide an entry below; it cannot carry the mark of an opaque directory, which hides all
    entries below (overlayfs, "whiteouts and opaque directories"). The paths of other character
    devices are `excluded`.

    Raises P2PDistError naming the first file that cannot be read and, if an image is to keep the
    times of entries, UsageError naming the first that has one outside 1970 to 2106: mksquashfs
    would write another one without a word."""
    counts = Scan(excluded=[*scan.excluded])
    for directory in sorted(scan.directories):
        prefix = directory + b"/" if directory else b""
        for row in scan.rows(directory):
            path = prefix + row.name
            if not _leave_out(counts, scan, path, row, whiteouts):
                _add(counts, scan, path, row, times_kept)
    counts.excluded.sort()
    counts.dropped.sort(key=lambda item: (item.path, item.what))
    return counts


def _leave_out(counts: Scan, scan: TreeScan, path: bytes, row: Row, whiteouts: bool) -> bool:
    """Note an entry, or the mark of a directory, that no image carries; returns whether it is left
    out."""
    if stat.S_ISDIR(row.mode):
        try:
            if is_opaque(scan.path(path)):
                counts.drop(os.fsdecode(path), "opaque mark, which trees carry")
        except OSError as error:
            raise changed(scan.path(path)) from error
    if whiteouts and stat.S_ISCHR(row.mode) and not row.size:
        return False
    kind = KINDS_DROPPED.get(stat.S_IFMT(row.mode))
    if kind is None:
        return False
    counts.drop(os.fsdecode(path), kind)
    if stat.S_ISCHR(row.mode):
        counts.excluded.append(
            path
        )  # mksquashfs, which leaves the other kinds out by itself, cannot tell it from a whiteout
    return True


def _add(counts: Scan, scan: TreeScan, path: bytes, row: Row, times_kept: bool) -> None:
    if stat.S_ISREG(row.mode):
        counts.files += 1
        counts.bytes_total += row.size
        full = scan.path(path)
        if not os.access(full, os.R_OK, effective_ids=True):
            raise (
                unreadable(os.fsdecode(full), PermissionError(errno.EACCES, "Permission denied"))
                if os.path.lexists(full)
                else changed(full, "vanished")
            )
        if row.mode & EXECUTABLE and has_capabilities(full):
            counts.drop(os.fsdecode(path), CAPABILITIES)
    if not stat.S_ISLNK(row.mode):
        if row.mode & stat.S_ISUID:
            counts.drop(os.fsdecode(path), "setuid bit")
        if row.mode & stat.S_ISGID:
            counts.drop(os.fsdecode(path), "setgid bit")
    if times_kept and not 0 <= row.mtime_ns < _MTIME_END_NS:
        raise UsageError(
            f"{printable(os.fsdecode(path))} was modified at a time that no image can hold: before 1970 or after 2106",
            remedy="Set another time with touch, or one for all with pack --mtime; trees and tars hold any time",
        )
