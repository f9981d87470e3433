"""The checks of `p2pdist doctor`: each function returns findings and raises nothing but OSError,
which `checked` turns into a finding."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from p2pdist.cli.output import amount
from p2pdist.model.address import address_text
from p2pdist.model.errors import NotFound, P2PDistError, foreseen, unreached

State = Literal["ok", "warning", "failed"]
CLOCK_OFF_S_MAX = 2.0
"""Tracker and host may differ by so much: deadlines and certificates go by the clock. The header
says whole seconds."""

FREE_MIN, FREE_LITTLE = 256 << 20, 10 << 30
INODES_MIN, INODES_LITTLE = 1_000, 100_000
SAMPLE_BYTES = 64 << 20
DISK_SLOW_BYTES_S = 100e6
ANSWER_S, PROBE_S, ORIGIN_S = 5.0, 20.0, 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` says what to do unless it is ok."""

    name: str
    state: State
    detail: str
    remedy: str = ""


async def checked(name: str, check: Awaitable[list[Finding]]) -> list[Finding]:
    """The findings of `check`; an OSError in it becomes a finding."""
    try:
        return await check
    except OSError as error:
        problem = foreseen(error)
        what, remedy = (problem.what, problem.remedy) if problem else (str(error), "See what is wrong with that file")
        return [Finding(name, "failed", what, remedy)]


def versions() -> list[Finding]:
    """Whether what the program needs is installed."""
    missing = []
    for line in importlib.metadata.requires("p2pdist") or ():
        name, _, condition = line.partition(";")
        requirement = re.match(r"[A-Za-z0-9._-]+", name.strip())
        if requirement and "extra" not in condition:
            try:
                importlib.metadata.version(requirement.group())
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement.group())
    detail = f"p2pdist {importlib.metadata.version('p2pdist')}, Python {platform.python_version()}, Linux {platform.release()}"
    if missing:
        return [
            Finding("versions", "failed", f"{detail}; without {', '.join(missing)}", "Install p2pdist again with pip")
        ]
    return [Finding("versions", "ok", detail)]


async def trackers(urls: Sequence[str]) -> list[Finding]:
    """Whether each tracker answers, and this host's clock against its."""
    import aiohttp

    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.model.url import redacted

    findings: list[Finding] = []
    access = TrackerAccess.current()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
        for url in urls:
            shown = redacted(url)
            try:
                secured = await access.request(url)
                asked = time.time()
                async with http.get(url.rstrip("/") + "/readyz", **secured) as answer:
                    body = await answer.content.read(1 << 16)
                    answered = time.time()
                if answer.status != 200 or b'"sessions"' not in body:
                    findings.append(_tracker_failed(shown, f"answers HTTP {answer.status}, not as a tracker does"))
                    continue
                findings.append(Finding("tracker", "ok", f"{shown} answers in {(answered - asked) * 1000:.0f} ms"))
                findings += _origin_of(shown, body)
                findings.append(_clock(shown, answer.headers.get("Date", ""), asked, answered))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, P2PDistError) as error:
                why = f"does not answer: {unreached(error)}"
                findings.append(_tracker_failed(shown, why, access.remedy(url, error)))
    return findings


def _origin_of(url: str, body: bytes) -> list[Finding]:
    """Whether a tracker can read its origin, as its health says; nothing where it does not."""
    import msgspec

    try:
        origin = msgspec.json.decode(body, type=dict[str, object]).get("origin")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    if not isinstance(origin, dict) or origin.get("reachable") is not False:
        return []
    why = str(origin.get("problem") or "its log says why")
    remedy = "Set the credentials in the tracker's environment, or correct its --origin"
    return [Finding("tracker's origin", "failed", f"{url} cannot read its origin: {why}", remedy)]


def _tracker_failed(url: str, why: str, remedy: str = "Start it, or name it with --tracker") -> Finding:
    return Finding("tracker", "failed", f"{url} {why}", f"{remedy}, and see that no firewall is between")


def _clock(url: str, date: str, asked: float, answered: float) -> Finding:
    """The header names a whole second, which may have begun up to a second before it was
    written."""
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return Finding(
            "clock", "warning", f"{url} does not say what time it is", "Ask it directly, not through a proxy"
        )
    ahead, behind = asked - (theirs + 1.0), theirs - answered
    off = max(ahead, behind, 0.0)
    if off > CLOCK_OFF_S_MAX:
        way = "ahead of" if ahead > behind else "behind"
        return Finding(
            "clock", "failed", f"this host is {off:.0f} s {way} {url}", "Run chrony or systemd-timesyncd on both"
        )
    return Finding("clock", "ok", f"agrees with that of {url} to within {CLOCK_OFF_S_MAX:.0f} s")


async def port(address: tuple[str, int]) -> list[Finding]:
    """Whether an agent listens there already, or could, and at the port next to it, where
    BitTorrent peers come."""
    import aiohttp

    host, number = address
    where = address_text(host, number)
    failure = why_taken(host, number)
    if not failure:
        return [Finding("port", "ok", f"{where} is free"), _bittorrent_port(host, number + 1)]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    for scheme in ("http", "https"):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http,
                http.get(f"{scheme}://{address_text(local, number)}/healthz", ssl=False) as answer,
            ):
                if b'"disk"' in await answer.content.read(1 << 16):
                    finding = Finding("port", "ok", f"an agent answers at {where}")
                    return [finding, _bittorrent_port(host, number + 1, agent=True)]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            continue
    remedy = "Stop what listens there (ss -ltnp says what), or choose another address with --listen"
    return [
        Finding("port", "failed", f"cannot listen on {where}, and no agent answers there: {failure}", remedy),
        _bittorrent_port(host, number + 1),
    ]


def _bittorrent_port(host: str, number: int, *, agent: bool = False) -> Finding:
    """With `agent` one answers next to it, and may be what listens there."""
    where, failure = address_text(host, number), why_taken(host, number)
    if not failure:
        return Finding("BitTorrent port", "ok", f"{where} is free")
    if agent:
        return Finding("BitTorrent port", "ok", f"{where} is in use, as it is when the agent speaks BitTorrent")
    remedy = "Choose another with --bt-listen; else blobs come by the tracker's trees alone"
    return Finding("BitTorrent port", "warning", f"cannot listen on {where}: {failure}", remedy)


def why_taken(host: str, number: int) -> str:
    """Why an agent cannot listen there; empty when it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            probe.listen(1)
    except (OSError, UnicodeError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


async def agent(path: Path) -> list[Finding]:
    """Whether an agent answers on its socket, and whether it has a tracker."""
    from p2pdist.agent.api.client import LocalClient

    try:
        there = path.exists()
    except PermissionError:
        there = True  # in a directory that this user may not enter; what asks it says so
    if not there:
        return [
            Finding("agent", "warning", f"none runs: there is no {path}", "Start `p2pdist agent`, or name its --socket")
        ]
    try:
        status = await asyncio.to_thread(LocalClient(path, answer_s=ANSWER_S).status)
    except P2PDistError as error:
        return [Finding("agent", "failed", error.what, error.remedy)]
    disk = (status.get("store") or {}).get("disk", "ok")
    if disk != "ok":
        return [Finding("agent", "failed", disk, "See dmesg, and whether the store's directory is in its place")]
    tracker = status.get("tracker") or {}
    if tracker.get("url") and not tracker.get("connected"):
        why = f"the agent has no session with {tracker['url']}: {tracker.get('problem') or 'no answer'}"
        return [Finding("agent", "failed", why, "See whether the tracker answers this host")]
    found = [Finding("agent", "ok", f"{status.get('host', '')} answers on {path}")]
    if tracker.get("url") == "":
        why = tracker.get("problem") or "it pulls from the origin and from agents of its network"
        found.append(Finding("agent's tracker", "warning", f"the agent has none: {why}", "Start it with --tracker URL"))
    return found


async def reachability(path: Path, urls: Sequence[str]) -> list[Finding]:
    """Whether a tracker can connect to this host's agent at the address that it gives to others;
    nothing where no agent or no tracker says."""
    import aiohttp
    import msgspec

    from p2pdist.agent.api.client import LocalClient
    from p2pdist.agent.tracker.reachability import REMEDY
    from p2pdist.cli.tracker_access import TrackerAccess
    from p2pdist.model.errors import UNDECODABLE
    from p2pdist.model.messages import Reachability
    from p2pdist.model.url import redacted

    try:
        status = await asyncio.to_thread(LocalClient(path, answer_s=ANSWER_S).status)
    except P2PDistError:
        return []  # agent() says so
    host, access = str(status.get("host", "")), TrackerAccess.current()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
        for url in urls:
            try:
                where = f"{url.rstrip('/')}/v1/hosts/{quote(host, safe='')}/reachability"
                async with http.get(where, **await access.request(url)) as answer:
                    body = await answer.content.read(1 << 16)
                if answer.status != 200:
                    continue
                reached = msgspec.json.decode(body, type=Reachability)
            except (aiohttp.ClientError, TimeoutError, OSError, P2PDistError, *UNDECODABLE):
                continue  # trackers() says so
            if reached.problem:
                why = f"others cannot reach {host} at {reached.address}: {reached.problem}{reached.hint}. They read storage instead"
                return [Finding("reachability", "failed", why, REMEDY)]
            return [Finding("reachability", "ok", f"{redacted(url)} reaches {host} at {reached.address}")]
    return []


async def origin(url: str) -> list[Finding]:
    """Whether central storage can be listed and read."""
    from p2pdist.model.url import redacted
    from p2pdist.origin.drivers import open_origin

    if not url:
        remedy = "Name what the tracker was given, with --origin"
        return [Finding("origin", "warning", "not checked: no --origin is named", remedy)]
    shown = redacted(url)
    try:
        source = open_origin(url)
        try:
            async with asyncio.timeout(ORIGIN_S):
                tags = await source.tags()
                if tags:
                    await source.read(tags[0][1].digest)
        finally:
            await source.close()
    except P2PDistError as error:
        remedy = error.remedy or "See that the URL and the credentials are right"
        if isinstance(error, NotFound) and url.lower().startswith(("http://", "https://")):
            # A web server over storage into which nothing was pushed yet looks like a wrong path.
            return [Finding("origin", "warning", f"{shown} has no packages: {error.what}", remedy)]
        return [Finding("origin", "failed", error.what, remedy)]
    except TimeoutError:
        return [Finding("origin", "failed", f"{shown} does not answer in {ORIGIN_S:.0f} s", "See the network to it")]
    if not tags:
        return [
            Finding("origin", "warning", f"{shown} has no packages", "See that the URL is right; p2pdist push fills it")
        ]
    return [Finding("origin", "ok", f"{shown} has {len(tags)} packages, and a manifest could be read")]


def policies(path: Path) -> list[Finding]:
    """Every mistake in a tracker's policies, by table and key."""
    from tracker.policies import check_policies

    table, mistakes = check_policies(path)
    if not mistakes:
        return [Finding("policies", "ok", f"{len(table.policies)} policies in {path}")]
    named = (
        (", ".join(part for part in (mistake.table, mistake.key) if part) or str(path), mistake) for mistake in mistakes
    )
    return [Finding("policies", "failed", f"{where}: {mistake.what}", mistake.remedy) for where, mistake in named]


def store(directory: Path) -> list[Finding]:
    """Free space and speed of the disk that the store is on, or will be."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        volume = os.statvfs(place)
        free = volume.f_bavail * volume.f_frsize
        space = _space(directory, free)
        files = _inodes(directory, volume)
        if space.state == "failed" or (files and files[0].state == "failed"):
            return [space, *files]
        return [space, *files, _disk(place)]
    except OSError as error:
        return [_unwritable("store", place, error)]


def _unwritable(name: str, place: Path, error: OSError) -> Finding:
    remedy = f"Let this user write there (chown {os.geteuid()} {place}), or give --store"
    problem = foreseen(error, str(place))
    if problem is not None and error.errno not in (errno.EACCES, errno.EPERM):
        remedy = problem.remedy
    why = problem.what if problem is not None else f"{place} cannot be used: {error.strerror or error}"
    return Finding(name, "failed", f"cannot write: {why}", remedy)


def _inodes(directory: Path, found: os.statvfs_result) -> list[Finding]:
    """Whether more files can be made; some file systems say that they have 0 of 0, and make what is
    needed."""
    if not found.f_files or found.f_favail >= INODES_LITTLE:
        return []
    detail = f"{found.f_favail} inodes free for {directory}: no more files than that can be made"
    remedy = "Remove files there (df -i), or give --store on a file system with more inodes"
    return [Finding("inodes", "failed" if found.f_favail < INODES_MIN else "warning", detail, remedy)]


def _space(directory: Path, free: int) -> Finding:
    detail = f"{amount(free)} free for {directory}"
    if free < FREE_MIN:
        return Finding("store", "failed", detail, "Free some space, or give --store on another disk")
    if free < FREE_LITTLE:
        return Finding("store", "warning", detail, "Packages are often larger: give --store on a larger disk")
    return Finding("store", "ok", detail)


def _disk(place: Path) -> Finding:
    """Writes and reads a sample; what was written is brought to the disk and dropped from memory
    before it is read. Raises OSError."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=place, prefix=".p2pdist-doctor-", buffering=0) as sample:
        began = time.perf_counter()
        for _ in range(SAMPLE_BYTES // len(block)):
            sample.write(block)
        os.fsync(sample.fileno())
        wrote = time.perf_counter()
        os.posix_fadvise(sample.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        sample.seek(0)
        while sample.read(1 << 20):
            pass
        read = time.perf_counter()
    speeds = SAMPLE_BYTES / max(wrote - began, 1e-9), SAMPLE_BYTES / max(read - wrote, 1e-9)
    detail = f"writes {speeds[0] / 1e6:.0f} MB/s, reads {speeds[1] / 1e6:.0f} MB/s at {place}"
    if min(speeds) < DISK_SLOW_BYTES_S:
        return Finding(
            "disk", "warning", detail, "A host receives no faster than it writes: give --store on a faster disk"
        )
    return Finding("disk", "ok", detail)


def mounts(directory: Path) -> list[Finding]:
    """Which mount methods work here, for this user."""
    from p2pdist.mount.squashfs import missing

    root = os.geteuid() == 0
    findings = []
    if root:
        findings.append(Finding("root", "ok", "packages can be mounted for all users"))
    else:
        findings.append(
            Finding("root", "warning", "not root", "Let the agent run as root to mount packages for all users")
        )
    for way, needs, remedy in (
        ("overlay", "layers of squashfs", "Load the module overlay"),
        ("loop", "images", "Allow /dev/loop-control and loop devices; images are unpacked instead"),
        ("writable", "views that programs write to", "Give --store a disk, no overlay; files are copied instead"),
        ("erofs", "trees", "It takes Linux 6.12 and a --store on a disk; files are copied instead"),
        (
            "lazy",
            "trees whose contents come later",
            "It takes Linux 6.14 and --store on ext4, Btrfs or XFS, or p2pdist[fuse], libfuse 3 and loop devices",
        ),
    ):
        why = _probe(way, directory) if root else "takes root"
        state: State = "warning" if why else "ok"
        findings.append(Finding(way, state, why or f"{needs} can be mounted", remedy if why else ""))
    if why := _probe("reflink", directory):
        mounted = next(finding for finding in findings if finding.name == "erofs").state == "ok"
        detail = f"none here ({why}): trees are copied where they are not mounted"
        remedy = "" if mounted else "Give --store on Btrfs or XFS"
        findings.append(Finding("reflink", "ok" if mounted else "warning", detail, remedy))
    else:
        findings.append(Finding("reflink", "ok", "files of trees can share blocks with the store"))
    why = "" if "squashfs" in _filesystems() or shutil.which("modprobe") else "this kernel knows no squashfs"
    findings.append(
        Finding(
            "squashfs",
            "warning" if why else "ok",
            why or "the kernel reads it",
            "Load the module squashfs" if why else "",
        )
    )
    why = missing()
    remedy = "Install squashfuse and fuse3, and let this user open /dev/fuse"
    findings.append(
        Finding(
            "squashfuse", "warning" if why else "ok", why or "images can be read without root", remedy if why else ""
        )
    )
    why = _probe("userns", directory)
    remedy = "Allow them: sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces"
    findings.append(Finding("user namespaces", "warning" if why else "ok", why or "can be made", remedy if why else ""))
    return findings


def _filesystems() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines() if line.strip()}


def _scratch(directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A new directory in `directory`, or where temporary files go when none can be made there. Only
    making one tells: a file system that an error made read-only may say that it can be written to.
    Raises OSError."""
    from p2pdist.mount.scratch import scratch_parent

    try:
        return tempfile.TemporaryDirectory(dir=directory, prefix=".p2pdist-doctor-", ignore_cleanup_errors=True)
    except OSError:
        return tempfile.TemporaryDirectory(dir=scratch_parent(), prefix=".p2pdist-doctor-", ignore_cleanup_errors=True)


def _probe(way: str, directory: Path) -> str:
    """Why a way of mounting does not work here; empty when it does (probe.py)."""
    with _scratch(directory) as scratch:
        words = [sys.executable, "-m", "p2pdist.cli.probe", way, scratch]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {PROBE_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1][:200]
    return done.stdout.strip()
