"""The directory of a compile cache on a host: made for one user alone, and filled from a package.

What is in a cache is executed. So the directory and all above it up to the user's own must be
nobody else's to write to, and files come from a package below the namespace that the user or the
operator named, and from nowhere else.
"""

from __future__ import annotations

import grp
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdist.cli.services import follow_pull, pulled_name
from p2pdist.cli.verbs.cache.key import VARIABLES, CacheKey
from p2pdist.model.errors import NotFound, P2PDistError, Refused, TooLarge, UsageError
from p2pdist.model.messages import MountRequest

if TYPE_CHECKING:
    from p2pdist.agent.api.client import LocalClient

FILES_MAX = 200_000
BYTES_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did: whether there was a package, and what of it was not here before."""

    found: bool
    files: int = 0
    size: int = 0


def default_directory(key: CacheKey) -> Path:
    """Where the caches of a key are unless the user says otherwise. Raises UsageError for a user
    without a home directory."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if home.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:  # neither HOME nor an entry in passwd(5)
        raise UsageError("this user has no home directory for caches", remedy="Name a directory with --dir") from error
    return base / "p2pdist" / "caches" / key.namespace.replace("/", "_") / key.digits


def make_directory(directory: Path) -> None:
    """Make the directory and those of all caches, if need be. Raises Refused where another user
    could write to it, P2PDistError where it cannot be made."""
    directory = directory.absolute()
    try:
        for above in reversed(directory.parents):
            if not above.is_dir():
                above.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Refused(
                f"other users can write to the cache directory {directory}, and what is in it is executed",
                remedy="Name another one with --dir, or chmod go-w it",
            )
        for above in {*directory.parents, *Path(os.path.realpath(directory)).parents}:
            if any(_is_of_others(status) for status in (os.lstat(above), os.stat(above))):
                raise Refused(
                    f"other users can write to {above}, and so can exchange the cache directory {directory}, which is executed",
                    remedy="Name another one with --dir, or chmod go-w it",
                )
        for part in VARIABLES.values():
            (directory / part).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise P2PDistError(
            f"the cache directory {directory} cannot be made: {error.strerror}", remedy="Name another one with --dir"
        ) from error


def _is_of_others(status: os.stat_result) -> bool:
    """Whether another user can exchange what is in a directory, or where a link leads. In a
    directory with the sticky bit, such as /tmp, each user exchanges only what is its own."""
    if status.st_uid not in (0, os.geteuid(), _unmapped_user()):
        return True
    mode = status.st_mode
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        return False
    return bool(mode & 0o002) or (bool(mode & 0o020) and not _is_own_group(status.st_gid))


def _unmapped_user() -> int:
    """As whom a user namespace shows the owners of what is outside of it, root among them."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def _is_own_group(group: int) -> bool:
    """Whether a group has this user alone, as systems make one for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user and not {*found.gr_mem} - {user}


def restore(key: CacheKey, directory: Path, client: LocalClient, *, quiet: bool = False) -> Restored:
    """Bring the package of a key and copy what `directory` does not have. Raises Refused, TooLarge,
    and what pulling and mounting raise, except that there is no such package."""
    make_directory(directory)
    name = str(key.reference)
    try:
        pulled = follow_pull(client, name, quiet=quiet)
    except NotFound:
        return Restored(False)
    with _seen(client, pulled_name(name, pulled)) as source:
        return _copy_missing(source, directory)


@contextmanager
def _seen(client: LocalClient, name: str) -> Iterator[Path]:
    shown = client.mount(MountRequest(name, "", until_exit=True))
    try:
        yield Path(shown.path)
    finally:
        client.unmount(shown.path)


def _copy_missing(source: Path, directory: Path) -> Restored:
    """Copy regular files that are not there. Each appears whole, as other processes of the user may
    be reading."""
    files = size = 0
    try:
        parts = [source / part for part in VARIABLES.values() if not (source / part).is_symlink()]
        for above, names, found in chain.from_iterable(map(os.walk, parts)):
            names[:] = [name for name in names if not os.path.islink(os.path.join(above, name))]
            target = directory / os.path.relpath(above, source)
            _make_plain(target)
            for name in found:
                path, status = os.path.join(above, name), os.lstat(os.path.join(above, name))
                if not stat.S_ISREG(status.st_mode) or os.path.lexists(target / name):
                    continue
                files, size = files + 1, size + status.st_size
                if files > FILES_MAX or size > BYTES_MAX:
                    raise TooLarge(
                        f"the cache has more than {FILES_MAX} files or {BYTES_MAX} bytes",
                        remedy="Save a smaller one, from fewer programs",
                    )
                _copy(path, target / name)
    except OSError as error:
        raise P2PDistError(
            f"the cache cannot be written to {error.filename or directory}: {error.strerror}",
            remedy="Make room there, or name another directory with --dir",
        ) from error
    return Restored(True, files, size)


def _make_plain(target: Path) -> None:
    with suppress(FileExistsError):
        target.mkdir(mode=0o700)
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        raise Refused(f"{target} is no directory", remedy="Remove it, or name another directory with --dir")


def _copy(path: str, target: Path) -> None:
    partial = target.parent / f".restored-{secrets.token_hex(6)}"
    try:
        shutil.copyfile(path, partial)
        shutil.copystat(path, partial)
        partial.chmod(stat.S_IMODE(os.stat(path).st_mode) & 0o700 | 0o600)
        partial.rename(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
