"""The process that serves what one lazy view reads as files of FUSE: its device, and the images of
its SquashFS layers.

Theory. A loop device with direct I/O lies over each file; EROFS images have that of the device as
theirs, and SquashFS images are mounted from it. So the kernel does everything but give the bytes:
names, attributes, page cache, mmap, programs.

Each read that reaches this process waits until an agent has said that the bytes are there (the
protocol of the supervisor, which counts all files as one, each behind that before), and is answered
from the file on the disk: what the agent fills is `device`, and `image-1` and so on are further
links to blobs of the store. What was filled once is given without a question. A read waits for a
limit at most, then it gets EIO.

Two processes: the server, and its guard, which forks it. Where the server is killed, the kernel
ends the reads that it had with an error, never with zeros, and so each read until the guard has
forked another server, which mounts FUSE anew and has the loop devices read from that. Where both
are killed, the agent starts another pair. Loop devices are held open by what is mounted on them
alone: they go with the last user of the view, FUSE with them, and both processes end.

Once nothing is missing the loop devices read from the files on the disk, and both processes end
too: the view is then as fast as one that was complete from the start.

The binding is mfusepy, over libfuse 3 of the host: of the bindings that are maintained it is the
one that needs no compiler. Neither it nor the others can pass complete files through
(FUSE_PASSTHROUGH, Linux 6.9); the loop device does that on every kernel.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from p2pdist.mount import kernel
from p2pdist.mount.supervisor.process import AGENTS_MAX, avoid_memory_killer, leave_service
from p2pdist.mount.supervisor.protocol import (
    ANSWER,
    BLOCK_BYTES,
    DEVICE,
    DROP,
    EXPIRED,
    FAULT,
    GREETING,
    NOTICE,
    ORDER,
    READ,
    SOCKET,
    WHOLE,
    begins,
)

POINT, IMAGE, LOOP = "fuse", "image-", ".loop"
"""Names in the directory of a view that is filled so: the mount point of its FUSE file system; an
image, with its number behind; behind the name of a file, a link to the loop device over it."""

READERS_MAX = 4096
"""Reads that wait at once; one more gets EIO."""

THREADS_MAX = 1024
"""Threads of libfuse. A loop device passes on at most 128 reads at a time, in up to 8 parts."""

BACKGROUND_MAX = 1024
"""Reads that the kernel passes on at a time (its own limit is 12, and reads behind those wait)."""

ATTRIBUTES_S = 10**8
"""How long the kernel may go by what it knows of a file: for ever, also after the server."""

FILES_MAX = 4096
BEGIN_S = 5.0
PAUSE_S = 0.02
"""Between the end of one server and the next."""

_FUSE = "/dev/fuse"
_GONE = {errno.ENXIO, errno.ENODEV, errno.ENOENT}
"""What is answered for a loop device that nothing has mounted any more."""


@dataclass(slots=True)
class _Reader:
    """A read that waits for `count` bytes from `offset`."""

    number: int
    offset: int
    count: int
    error: int = errno.EIO
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _File:
    """A file on the disk: its name, a descriptor of it, where it begins in the counting of the
    protocol, and its bytes."""

    name: str
    descriptor: int
    begin: int
    size: int


class Filled:
    """Which blocks are filled, in memory that survives the server. `mark` is for one thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks = mmap.mmap(-1, max(1, -(-size // BLOCK_BYTES)))

    def has(self, offset: int, count: int) -> bool:
        """Whether all of a range is filled."""
        return self._blocks.find(b"\0", offset // BLOCK_BYTES, -(-(offset + count) // BLOCK_BYTES)) < 0

    def mark(self, offset: int, count: int) -> None:
        """Note that a range is filled: the blocks that are whole in it, and a short last one."""
        end = offset + count
        first = -(-offset // BLOCK_BYTES)
        last = -(-end // BLOCK_BYTES) if end >= self._size else end // BLOCK_BYTES
        if last > first:
            self._blocks[first:last] = b"\1" * (last - first)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What servers that follow each other have in common."""

    directory: Path
    limit_s: float
    binding: ModuleType
    files: dict[str, _File]
    """By name."""
    listener: socket.socket
    filled: Filled
    counters: mmap.mmap
    """Readers that got EIO because their time was up, in 8 bytes."""

    @property
    def refused(self) -> int:
        """How many that are."""
        return int.from_bytes(self.counters[:8], "little")

    def count_refused(self) -> None:
        """One more."""
        self.counters[:8] = (self.refused + 1).to_bytes(8, "little")


class _Files:
    """The file system, as mfusepy asks for it: a directory with the files of a view."""

    use_ns = True

    def __init__(self, server: _Server, files: Mapping[str, _File]) -> None:
        self._server = server
        self._files = {f"/{name}": file for name, file in files.items()}

    def init_with_config(self, connection: Any, _config: Any) -> None:
        """The kernel begins."""
        if connection is not None:
            connection.max_background = BACKGROUND_MAX
            connection.congestion_threshold = BACKGROUND_MAX
        self._server.began.set()

    def getattr(self, path: str, _handle: Any = None) -> dict[str, int]:
        """What stat(2) says."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": self._file(path).size}

    def readdir(self, _path: str, _handle: Any) -> list[str]:
        """The names."""
        return [".", "..", *(path[1:] for path in self._files)]

    def open(self, path: str, flags: int) -> int:
        """Reading is allowed."""
        self._file(path)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "it is read-only")
        return 0

    def read(self, path: str, size: int, offset: int, _handle: Any) -> bytes:
        """What a file has there, once it is filled."""
        return self._server.read(self._file(path), offset, size)

    def _file(self, path: str) -> _File:
        if path not in self._files:
            raise OSError(errno.ENOENT, path)
        return self._files[path]


class _Server:
    """Serves reads, in threads of libfuse, and agents, in the main thread. Its numbers of bytes are
    those of the protocol."""

    def __init__(self, shared: _Shared) -> None:
        self.began = threading.Event()
        """Set once the kernel speaks with the file system."""
        self._shared = shared
        self._point = shared.directory / POINT
        self._lock = threading.Lock()
        self._readers: dict[int, _Reader] = {}
        self._numbers = itertools.count(time.monotonic_ns())
        self._agents: list[socket.socket] = []
        """Connections, the latest last: that one hears of readers, and all may give orders."""
        self._whole = False
        self._loops: dict[str, str] = {}
        """The loop devices, by the file that each is over."""
        self._ended, self._ending = os.pipe()
        """Readable once the file system has ended."""

    def run(self, ready: int) -> None:
        """Serve until the device is whole or the view is gone; writes a byte to `ready` once reads
        are served. Raises OSError when it cannot begin."""
        with suppress(OSError):
            kernel.unmount(self._point, lazily=True)  # that of the server before
        threading.Thread(target=self._serve, daemon=True).start()
        if not self.began.wait(BEGIN_S):
            raise OSError(errno.EIO, "no FUSE file system can be mounted", str(self._point))
        self._change(lambda file: self._point / file.name)
        with suppress(OSError):
            os.write(ready, b"+")
        while self._step():
            pass

    def _serve(self) -> None:
        options = {"fsname": "p2pdist-lazy", "ro": True, "nosuid": True, "nodev": True, "direct_io": True}
        options |= {"attr_timeout": ATTRIBUTES_S, "entry_timeout": ATTRIBUTES_S}
        if self._shared.binding.fuse_version_minor >= 12:  # before, libfuse had no limit
            options["max_threads"] = THREADS_MAX
        try:
            # In a thread other than the main one, so that it leaves signals alone.
            self._shared.binding.FUSE(
                _Files(self, self._shared.files), os.fspath(self._point), foreground=True, **options
            )
        except RuntimeError as error:
            self._say(f"the FUSE file system has ended: {error}")
        finally:
            os.close(self._ending)

    def _find_loops(self) -> None:
        """Remember which loop devices there are: the directory goes before the last program that
        reads the view."""
        for file in self._shared.files.values():
            if file.name not in self._loops:
                with suppress(FileNotFoundError):
                    self._loops[file.name] = os.readlink(self._shared.directory / f"{file.name}{LOOP}")

    def _change(self, path: Callable[[_File], Path]) -> None:
        """Have each loop device read from the path of its file. Raises OSError."""
        self._find_loops()
        for name, loop in self._loops.items():
            try:
                kernel.change_backing(loop, loop_name(self._shared.directory, name), path(self._shared.files[name]))
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    # -- readers, in threads of libfuse

    def read(self, file: _File, offset: int, size: int) -> bytes:
        """What a file has, once it is filled. Never less: the kernel would give zeros for the
        rest. Raises OSError."""
        count = min(size, file.size - offset)
        if count <= 0:
            return b""
        if self._shared.filled.has(file.begin + offset, count):
            self._tell(READ, _Reader(0, file.begin + offset, count), lossy=True)
        elif not self._whole:
            self._wait(file.begin + offset, count)
        data = os.pread(file.descriptor, count, offset)
        if len(data) != count:
            raise OSError(errno.EIO, "the file has become shorter")
        return data

    def _wait(self, offset: int, count: int) -> None:
        with self._lock:
            if self._whole:
                return
            if len(self._readers) >= READERS_MAX:
                raise OSError(errno.EIO, f"{READERS_MAX} readers wait already")
            reader = _Reader(next(self._numbers), offset, count)
            self._readers[reader.number] = reader
            self._tell(FAULT, reader)
        if not reader.answered.wait(self._shared.limit_s):
            self._expire(reader)
        if reader.error:
            raise OSError(reader.error, "it has not come")

    def _expire(self, reader: _Reader) -> None:
        with self._lock:
            if self._readers.pop(reader.number, None) is None:
                return  # it has come just now
            self._shared.count_refused()
            why = "the agent has not brought them" if self._agents else "no agent runs"
            self._say(f"a reader of {reader.count} bytes at {reader.offset} gets EIO: {why}")
            self._tell(EXPIRED, reader)

    # -- agents, in the main thread

    def _step(self) -> bool:
        """Take what has come; False when there is nothing left to do."""
        poll = select.poll()
        agents = {agent.fileno(): agent for agent in self._agents}
        for number in (self._ended, self._shared.listener.fileno(), *agents):
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll():
            if number == self._ended:
                return False
            if number == self._shared.listener.fileno():
                self._accept()
            elif agents[number] in self._agents and not self._obey(agents[number]):
                return False
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._shared.listener.accept()
        except OSError:
            return  # it has gone again
        connection.setblocking(False)
        greeting, device = NOTICE.pack(GREETING, 0, 0, self._shared.refused), self._shared.files[DEVICE].descriptor
        with self._lock:
            self._agents.append(connection)
            try:
                socket.send_fds(connection, [greeting], [device, device])
            except OSError:
                self._lose(connection)
            else:
                for reader in self._readers.values():
                    self._tell(FAULT, reader)
            if len(self._agents) > AGENTS_MAX:
                self._lose(self._agents[0])

    def _tell(self, kind: int, reader: _Reader, *, lossy: bool = False) -> None:
        """Under the lock, unless what is told may be lost."""
        for agent in self._agents[-1:]:
            try:
                agent.send(NOTICE.pack(kind, reader.number, reader.offset, reader.count))
            except OSError:  # also when it does not read what it is told: it connects again
                with suppress(OSError):
                    if not lossy:
                        agent.shutdown(socket.SHUT_RDWR)

    def _lose(self, agent: socket.socket) -> None:
        """A connection has ended; the one before it hears of readers, if it was the latest. Under
        the lock."""
        latest = agent is self._agents[-1]
        self._agents.remove(agent)
        agent.close()
        if latest and self._agents:
            for reader in self._readers.values():
                self._tell(FAULT, reader)

    def _obey(self, agent: socket.socket) -> bool:
        """Take one message; False when there is nothing left to do."""
        try:
            data = agent.recv(ORDER.size)
        except OSError:
            data = b""
        if len(data) != ORDER.size:
            with self._lock:
                self._lose(agent)
            return True
        match ORDER.unpack(data):
            case (kind, number, error) if kind == ANSWER:
                self._answer(number, error)
            case (kind, _, _) if kind == WHOLE:
                return not self._pass_on()
            case (kind, _, _) if kind == DROP:
                return False
        return True

    def _answer(self, number: int, error: int) -> None:
        self._find_loops()
        with self._lock:
            reader = self._readers.pop(number, None)
            if reader is None:
                return
            if not error:
                self._shared.filled.mark(reader.offset, reader.count)
            reader.error = error
            reader.answered.set()

    def _pass_on(self) -> bool:
        """Nothing is missing any more: have the loop devices read from the files on the disk. False
        where they cannot: reads go on through this process."""
        with self._lock:
            self._whole = True
            for reader in self._readers.values():
                reader.error = 0
                reader.answered.set()
            self._readers.clear()
        try:
            self._change(lambda file: Path(f"/proc/self/fd/{file.descriptor}"))
        except OSError as error:
            self._say(f"reads go on through FUSE: {error}")
            return False
        if len(self._loops) < len(self._shared.files):
            self._say("reads go on through FUSE: it is not known by which loop devices")
            return False
        with suppress(OSError):
            kernel.unmount(self._point, lazily=True)
        return True

    def _say(self, text: str) -> None:
        say(self._shared.directory, text)


def loop_name(directory: Path, file: str) -> bytes:
    """The name under which there is a loop device over a file of a view."""
    return os.fsencode(f"{directory.name}:{file}")


def say(directory: Path, text: str) -> None:
    """A line for the log of a view."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {directory.name}: {text}\n")
    sys.stderr.flush()


def binding() -> ModuleType:
    """mfusepy over libfuse 3. Raises OSError with the reason where that is not to be had."""
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        import mfusepy
    except ImportError as error:
        raise OSError(errno.ENOENT, "mfusepy is not installed: pip install 'p2pdist[fuse]'") from error
    except (OSError, AttributeError) as error:
        raise OSError(errno.ENOENT, "libfuse 3 is not installed: apt install libfuse3-3") from error
    if mfusepy.fuse_version_major < 3:
        raise OSError(errno.ENOENT, "libfuse 3 is not installed: apt install libfuse3-3")
    module: ModuleType = mfusepy
    return module


def _prepare(directory: Path, limit_s: float, held: Sequence[int]) -> _Shared:
    """Raises OSError where FUSE does not work here."""
    module = binding()
    os.close(os.open(_FUSE, os.O_RDWR | os.O_CLOEXEC))
    files = _open_files(directory, held)
    (directory / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    os.chdir(directory)
    listener.bind(SOCKET)
    listener.listen(8)
    os.chdir("/")
    end = max(file.begin + file.size for file in files.values())
    return _Shared(directory, limit_s, module, files, listener, Filled(end), mmap.mmap(-1, 8))


def _open_files(directory: Path, held: Sequence[int]) -> dict[str, _File]:
    device = os.dup(held[0]) if held else os.open(directory / DEVICE, os.O_RDWR | os.O_CLOEXEC)
    os.set_inheritable(device, False)
    opened = {DEVICE: device}
    for number in itertools.count(1):
        name = f"{IMAGE}{number}"
        try:
            opened[name] = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            break
    sizes = [os.fstat(descriptor).st_size for descriptor in opened.values()]
    places = zip(opened.items(), begins(sizes), sizes, strict=True)
    return {name: _File(name, descriptor, begin, size) for (name, descriptor), begin, size in places}


def _guard(shared: _Shared, ready: int) -> NoReturn:
    """Have a server as long as there is something to serve."""
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _Server(shared).run(ready)
                code = 0
            except OSError as error:
                say(shared.directory, f"{error.strerror}: {error.filename}")
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            os._exit(os.WEXITSTATUS(status))
        say(shared.directory, f"the server was ended by signal {os.WTERMSIG(status)}, another one takes its place")
        time.sleep(PAUSE_S)


def main() -> None:
    """`python -m p2pdist.mount.lazy.fuse DIRECTORY LIMIT_S [DEVICE OTHER]`: ends with 0 once reads
    of the device in DIRECTORY are served, by processes that go on. DEVICE is a descriptor of the
    device, and OTHER whatever came with it."""
    directory, limit_s = Path(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX if most < 0 else min(FILES_MAX, most), most))
    try:
        leave_service()
        avoid_memory_killer()
        shared = _prepare(directory, limit_s, [int(word) for word in sys.argv[3:]])
    except OSError as error:
        sys.stderr.write(f"{error.strerror}{f': {error.filename}' if error.filename else ''}\n")
        sys.exit(1)
    answers, ready = os.pipe()
    if os.fork() == 0:
        os.close(answers)
        _guard(shared, ready)
    os.close(ready)
    sys.exit(0 if os.read(answers, 1) else 1)


if __name__ == "__main__":
    main()
