"""Running this project as a user without rights, on a machine where the tests are root's.

The command starts in a mount namespace of its own in which /dev/fuse is open to everybody, as it is
where udev runs, and where the interpreter and the project can be reached although they may be below
a closed home directory.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

NOBODY = 65534
ROOT = Path(__file__).resolve().parent.parent


def _closed_parents() -> dict[Path, list[Path]]:
    """The topmost directories that others may not enter, and what is needed of each."""
    found: dict[Path, list[Path]] = {}
    for needed in {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}:
        for parent in reversed(needed.parents):
            if not parent.stat().st_mode & 0o001:
                found.setdefault(parent, []).append(needed)
                break
    return found


def as_nobody(hold: Path, *argv: str | Path, fuse: bool = True) -> list[str]:
    """The command that runs `argv` as NOBODY; `hold` is an empty directory for setting up. Without
    `fuse`, /dev/fuse is closed. More arguments may be appended."""
    lines = ["set -e"]
    hold = hold.resolve()
    if fuse:
        lines += [
            f"rm -f {hold}/fuse; mknod {hold}/fuse c 10 229",
            f"chmod 666 {hold}/fuse",
            f"mount --bind {hold}/fuse /dev/fuse",
        ]
    for number, (parent, needed) in enumerate(_closed_parents().items()):
        for index, path in enumerate(needed):
            point = hold / f"{number}-{index}"
            lines += [f"mkdir -p {point}", f"mount --rbind {shlex.quote(str(path))} {point}"]
        lines.append(f"mount -t tmpfs -o mode=755 closed {shlex.quote(str(parent))}")
        for index, path in sorted(enumerate(needed), key=lambda pair: pair[1]):
            quoted = shlex.quote(str(path))
            lines += [f"mkdir -p {quoted}", f"mount --move {hold / f'{number}-{index}'} {quoted}"]
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    lines.append(f'exec {user} {shlex.join(map(str, argv))} "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "sh"]
