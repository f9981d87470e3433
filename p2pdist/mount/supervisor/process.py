"""The supervisor of one lazy view: a small process that keeps readers waiting while the agent is
gone.

Theory. The kernel lets the readers of a file go on, and read what is there, once the last
descriptor of the fanotify group that is asked about the file is closed. They get EIO where nothing
is there (model/device.py), but they are to wait. So two processes hold it, and neither is the
agent: the supervisor, which reads events and answers them as the agent says, and its guard, which
waits for the supervisor to end and takes its place, with a guard of its own. What readers wait for
stands in memory that both share, so the guard goes on where the supervisor was killed. Readers that
the supervisor had read and not yet noted get EIO. Where both are killed, an agent that is connected
starts another pair with its own descriptor, and all that waited get EIO. Where the agent was killed
with them, the next one starts a pair with a new group. A view that was taken out of sight while in
use has no directory any more, so no agent comes back to it: the two end with its last user.

An event is answered by the number of the descriptor that came with it, in the process that read
it. After a takeover these numbers are kept occupied, or an event of the new process could have the
number of one of the old.

A reader of cells that have their heads goes on at once. Another waits for a limit at most, whether
an agent is connected or not, then it gets EIO. The kernel tries again at once, for each page of
what it reads ahead, so the same process gets EIO at once for REFUSED_S. Both
processes ignore the signals that end services, and leave the control group of the agent's service,
which a service manager kills as a whole. They import nothing of the project but this folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdist.mount.supervisor import fanotify
from p2pdist.mount.supervisor.fanotify import Fault
from p2pdist.mount.supervisor.protocol import (
    ANSWER,
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
)

CELL_FILE_BYTES = 1 << 16
HEAD_BYTES, HEAD_END = 5, 4096
"""The cells of a device, and where in each cell its head is, which has zeros for as long as
something of the cell is missing."""

KEYS_MAX = 4096
"""Descriptors of a supervisor, and so readers that wait for it at once; one more gets EPERM."""

AGENTS_MAX = 8
"""Connections at once; the oldest gives way."""

REFUSED_S = 1.0
"""A process that got EIO waits for nothing that is missing for so long."""

REFUSED_MAX = 1000
"""Processes for which that is known."""

POLL_S = 0.5
READY_S = 30.0
LOG = "supervisor.log"
WAIT = "-"
_SLOT = struct.Struct("=QQQd")
"""A reader that waits, by key: its number, offset, count, and since when (CLOCK_MONOTONIC); zeros
for none."""

_COUNTER = struct.Struct("=Q")

_CGROUPS = ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/systemd/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A reader that waits since `since`; `number` is its own, `fault.key` may be used again."""

    number: int
    fault: Fault
    since: float


class _Pending:
    """The readers that wait, in memory that survives the process which notes them."""

    def __init__(self) -> None:
        self._slots = mmap.mmap(-1, KEYS_MAX * _SLOT.size)
        self._counter = mmap.mmap(-1, _COUNTER.size)
        self._keys: dict[int, int] = {}
        """Keys by number, of this process alone: a look at all slots takes as long as an answer."""

    def put(self, fault: Fault) -> _Waiting:
        """Note a reader, which gets a number."""
        (last,) = _COUNTER.unpack_from(self._counter)
        _COUNTER.pack_into(self._counter, 0, last + 1)
        waiting = _Waiting(last + 1, fault, time.monotonic())
        _SLOT.pack_into(self._slots, fault.key * _SLOT.size, waiting.number, fault.offset, fault.count, waiting.since)
        self._keys[waiting.number] = fault.key
        return waiting

    def remove(self, key: int) -> None:
        """Forget a reader."""
        number, *_ = _SLOT.unpack_from(self._slots, key * _SLOT.size)
        self._keys.pop(number, None)
        _SLOT.pack_into(self._slots, key * _SLOT.size, 0, 0, 0, 0.0)

    def key(self, number: int) -> int | None:
        """The key of the reader with a number; None where it does not wait."""
        return self._keys.get(number)

    def take_over(self) -> None:
        """Another process has noted readers until now."""
        self._keys = {waiting.number: waiting.fault.key for waiting in self.all()}

    def all(self) -> list[_Waiting]:
        """Those that wait."""
        slots = enumerate(_SLOT.iter_unpack(self._slots))
        return [
            _Waiting(number, Fault(key, offset, count), since)
            for key, (number, offset, count, since) in slots
            if number
        ]


class _Heads:
    """Which cells of the device have their heads (p2pdist/model/device.py)."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen: set[int] = set()

    def cover(self, offset: int, count: int) -> bool:
        """Whether all cells of a range can be read."""
        return all(map(self._has, range(offset // CELL_FILE_BYTES, -(-(offset + count) // CELL_FILE_BYTES))))

    def _has(self, cell: int) -> bool:
        if cell not in self._seen:
            with contextlib.suppress(OSError):
                if any(os.pread(self._device, HEAD_BYTES, cell * CELL_FILE_BYTES + HEAD_END - HEAD_BYTES)):
                    self._seen.add(cell)
        return cell in self._seen


class _Supervisor:
    """One of the two processes: the guard while `watch` waits, then the supervisor."""

    def __init__(self, directory: Path, limit_s: float, held: tuple[int, int] | None = None) -> None:
        self._directory, self._limit_s = directory, limit_s
        if held is None:
            device = directory / DEVICE
            self._filler, self._group = fanotify.open_silently(device), fanotify.open_group()
            fanotify.mark(self._group, device)
        else:
            self._filler, self._group = held
        (directory / SOCKET).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        os.chdir(directory)
        self._listener.bind(SOCKET)
        self._listener.listen(8)
        self._bound = os.stat(SOCKET).st_ino
        os.chdir("/")
        self._pending = _Pending()
        if held is not None:
            self._refuse_unknown()
        self._refused = 0
        """Readers that got EIO because their time was up."""
        self._refused_at: dict[int, float] = {}
        """When processes got EIO, the latest last."""
        self._heads = _Heads(self._filler)
        self._agents: list[socket.socket] = []
        """Connections, the latest last: that one hears of readers, and all may give orders."""
        self._pids: dict[int, int] = {}
        """The processes of readers that wait, by key, as far as they are known."""
        self._guard = self._guard_fd = -1
        """The other process, and what becomes readable when it ends; -1 while there is none."""
        self._alone = False
        """Whether no guard could be started when that was last tried."""
        self._spare = -1
        """A descriptor that makes room for the connection of an agent."""
        self._keep_spare()

    def run(self) -> None:
        """Serve until the device is whole, or the view is gone."""
        self._hire()
        look_at = 0.0
        while True:
            ready = _ready((self._group, self._listener, self._guard_fd, *self._agents))
            if self._guard_fd in ready:
                os.close(self._guard_fd)
                self._guard_fd = -1  # the number is another descriptor's soon
                os.waitpid(self._guard, 0)
                self._hire()
            if any(agent in ready and self._obey(agent) for agent in list(self._agents)):
                return
            if self._listener in ready:
                self._accept()
            if self._group in ready:
                self._take()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + POLL_S
            if self._guard_fd < 0:
                self._hire()
            self._expire()
            if self._replaced():
                self._say("another supervisor has taken the place of this one")
                self._end(0)
                return
            if self._is_unused():
                self._say("nothing uses the view any more, which is out of sight")
                self._end(errno.EIO)
                return

    # -- the other process

    def _hire(self) -> None:
        """Have a guard. It waits until this process ends, and takes its place. Where the machine
        has no room for one, readers are supervised without, and the next look tries again."""
        mine = -1
        try:
            mine = os.pidfd_open(os.getpid())
            child = os.fork()
        except OSError as error:
            if mine >= 0:
                os.close(mine)
            if not self._alone:
                self._say(f"no guard can be started: {error}; the supervisor goes on without one, and tries again")
            self._alone = True
            return
        self._alone = False
        if child == 0:
            for agent in self._agents:
                agent.close()
            self._agents.clear()
            self._close_inherited(mine)
            while not _ready((mine,)):
                pass
            os.close(mine)
            self._take_over()
            self.run()
            os._exit(0)
        os.close(mine)
        self._guard, self._guard_fd = child, os.pidfd_open(child)

    def _take_over(self) -> None:
        """Go on for a supervisor that has ended."""
        self._say("the supervisor was killed, its guard takes its place")
        self._pids.clear()
        self._pending.take_over()
        keys = self._refuse_unknown()
        blank = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for key in keys - {blank}:
            os.dup2(blank, key, inheritable=False)
        if blank not in keys:
            os.close(blank)
        self._keep_spare()

    def _close_inherited(self, mine: int) -> None:
        """Close what does not go over from the supervisor to its guard: a reader that comes later
        may have the number of one of these as its key, and a reader's descriptor says that the
        device is in use."""
        self._guard_fd = self._spare = -1
        first = 3
        for kept in sorted((self._filler, self._group, self._listener.fileno(), mine)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, KEYS_MAX)

    def _refuse_unknown(self) -> set[int]:
        """Refuse the readers that a supervisor before this one had read and not noted; returns the
        keys of those that it noted."""
        keys = {waiting.fault.key for waiting in self._pending.all()}
        for key in range(KEYS_MAX):
            if key not in keys:
                fanotify.answer(self._group, key, errno.EIO)
        return keys

    # -- readers

    def _take(self) -> None:
        """Note the readers that have come, and tell the agent."""
        try:
            faults = fanotify.read_faults(self._group)
        except OSError as error:
            self._say(f"a reader is refused: {error}")
            return
        for fault in faults:
            if self._heads.cover(fault.offset, fault.count):
                self._answer(fault.key, 0)
                self._tell(READ, _Waiting(0, fault, 0.0), lossy=True)
            elif time.monotonic() - self._refused_at.get(fault.pid, -REFUSED_S) < REFUSED_S:
                self._answer(fault.key, errno.EIO)
            else:
                self._pids[fault.key] = fault.pid
                self._tell(FAULT, self._pending.put(fault))

    def _answer(self, key: int, error: int) -> None:
        fanotify.answer(self._group, key, error)
        self._pending.remove(key)
        pid = self._pids.pop(key, 0)
        if error and pid:
            self._refused_at.pop(pid, None)
            self._refused_at[pid] = time.monotonic()
            if len(self._refused_at) > REFUSED_MAX:
                del self._refused_at[next(iter(self._refused_at))]
        with contextlib.suppress(OSError):
            os.close(key)
        self._keep_spare()

    def _replaced(self) -> bool:
        """Whether another supervisor listens in place of this one: two agents started one each."""
        try:
            return os.stat(self._directory / SOCKET).st_ino != self._bound
        except OSError:
            return False  # the view is out of sight, and in use

    def _is_unused(self) -> bool:
        """Whether the view was taken out of sight, and nothing but these two processes and agents
        has the device open any more: only then it can be leased (fcntl(2), F_SETLEASE)."""
        if self._pending.all() or os.path.lexists(self._directory / SOCKET):
            return False
        try:
            fcntl.fcntl(self._filler, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._filler, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        for waiting in self._pending.all():
            fault = waiting.fault
            if self._heads.cover(fault.offset, fault.count):
                self._answer(fault.key, 0)
            elif now - waiting.since > self._limit_s:
                self._answer(fault.key, errno.EIO)
                self._refused += 1
                why = "no agent runs" if not self._agents else "the agent has not brought them"
                self._say(f"a reader of {fault.count} bytes at {fault.offset} gets EIO: {why}")
                self._tell(EXPIRED, waiting)

    # -- the agent

    def _accept(self) -> None:
        if self._spare >= 0:  # readers that wait may have all others
            os.close(self._spare)
            self._spare = -1
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        finally:
            self._keep_spare()
        connection.setblocking(False)
        self._agents.append(connection)
        if len(self._agents) > AGENTS_MAX:
            self._lose(self._agents[0])
        try:
            socket.send_fds(connection, [NOTICE.pack(GREETING, 0, 0, self._refused)], [self._filler, self._group])
        except OSError:
            self._lose(connection)
        else:
            self._tell_all()

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _tell_all(self) -> None:
        for waiting in self._pending.all():
            self._tell(FAULT, waiting)

    def _tell(self, kind: int, waiting: _Waiting, *, lossy: bool = False) -> None:
        if self._agents:
            try:
                fault = waiting.fault
                self._agents[-1].send(NOTICE.pack(kind, waiting.number, fault.offset, fault.count))
            except OSError as error:  # also when it does not read what it is told: it connects again
                if not (lossy and isinstance(error, BlockingIOError)):
                    self._lose(self._agents[-1])

    def _lose(self, agent: socket.socket) -> None:
        """A connection has ended; the one before it hears of readers, if it was the latest."""
        latest = agent is self._agents[-1]
        self._agents.remove(agent)
        agent.close()
        if latest and self._agents:
            self._tell_all()

    def _obey(self, agent: socket.socket) -> bool:
        """Take one message; True when there is nothing left to do."""
        try:
            data = agent.recv(ORDER.size)
        except OSError:
            data = b""
        if len(data) != ORDER.size:
            self._lose(agent)
            return False
        kind, number, error = ORDER.unpack(data)
        if kind == ANSWER and (key := self._pending.key(number)) is not None:
            self._answer(key, error)
        elif kind in (WHOLE, DROP):
            self._end(0 if kind == WHOLE else errno.EIO)
            return True
        return False

    def _end(self, error: int) -> None:
        """Let all readers go: with EIO, unless the device is whole."""
        if self._guard_fd >= 0:
            os.kill(self._guard, signal.SIGKILL)
            os.waitpid(self._guard, 0)
        if not error:
            fanotify.unmark(self._group, Path(f"/proc/self/fd/{self._filler}"))  # the name may be gone
        self._take()
        for waiting in self._pending.all():
            self._answer(waiting.fault.key, error)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {self._directory.name}: {text}\n")
        sys.stderr.flush()


def _ready(watched: Sequence[int | socket.socket]) -> list[int | socket.socket]:
    """What can be read within POLL_S."""
    poll, numbers = select.poll(), {one if isinstance(one, int) else one.fileno(): one for one in watched}
    numbers.pop(-1, None)  # a guard that there is not
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [numbers[number] for number, _ in poll.poll(1000 * POLL_S)]


def leave_service() -> None:
    """Leave the control group of the service that started this. Raises OSError where a service
    manager would end this process with the service."""
    for procs in _CGROUPS:
        with contextlib.suppress(OSError):
            Path(procs).write_text(str(os.getpid()))
    if ".service" in Path("/proc/self/cgroup").read_text() and "INVOCATION_ID" in os.environ:
        raise OSError(errno.EPERM, "it cannot leave the control group of the agent's service")


def avoid_memory_killer() -> None:
    """Have the kernel end other processes first where memory runs out, as far as that is
    allowed."""
    for score in (-1000, 0):
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(score))
            return


def _await(directory: Path) -> None:
    """Return once the device is there. What is said from now on stands in the view's log."""
    if not os.read(0, 1):
        sys.exit(0)
    log = os.open(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, place)
    os.close(log)
    os.close(nothing)


def main() -> None:
    """`python -m p2pdist.mount.supervisor.process DIRECTORY LIMIT_S [FILLER GROUP | -]`: ends
    with 0 once readers of the device in DIRECTORY are supervised, by a process that goes on. FILLER
    and GROUP are descriptors of a supervisor that was killed with its guard. With `-` it begins
    once a byte has come on standard input, and ends with 0 where none comes before the end."""
    directory, limit_s = Path(sys.argv[1]), float(sys.argv[2])
    held = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) == 5 else None
    if sys.argv[3:] == [WAIT]:
        _await(directory)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGIO):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (KEYS_MAX if most < 0 else min(KEYS_MAX, most), most))
    try:
        leave_service()
        avoid_memory_killer()
        supervisor = _Supervisor(directory, limit_s, held)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    if os.fork():
        os._exit(0)
    supervisor.run()


if __name__ == "__main__":
    main()
