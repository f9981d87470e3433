"""Keys of sealed packages, for hosts that may read them.

A namespace of the access file has a key: age identities in files, or printed by a command. By them
the tracker unwraps the keys in the config of a package (p2pdist/model/sealed_package.py). Only
identities of the namespace in which the package was found are tried, so the wrapped key of another
namespace does not open, under whatever name a manifest repeats it.

Identities and keys are in the memory of the tracker alone. A command runs at the first question,
again every ASK_S, and where what it printed does not open a key; never more often than every
AGAIN_S, whether or not it failed.

What a wrapped key opens to is remembered, also that it does not open. Keys are unwrapped a few at a
time, and all questions take turns, so a package with many keys does not keep others waiting.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from p2pdist.encryption import identities_in, unopened, unwrap
from p2pdist.model.digest import Digest
from p2pdist.model.errors import Corrupt, Refused, Unavailable, UsageError
from p2pdist.model.manifest import Manifest, decode_manifest
from p2pdist.model.sealed_package import SealedConfig, WrappedKey, decode_sealed_config
from tracker.access.control import AccessControl
from tracker.access.file import SealedDocument
from tracker.content import Content
from tracker.joined_reads import JoinedReads, remember

MANIFESTS_MAX = 10_000
"""Manifests of which it is remembered whether they are sealed, those that were asked for last."""

CONFIGS_MAX = 1000
"""Packages of which the wrapped keys are remembered, those that were asked for last; fewer where
they have more than UNWRAPPED_MAX keys together."""

UNWRAPPED_MAX = 10_000
"""Keys that are remembered, those that were asked for last."""

STEP = 16
"""Keys that are unwrapped in one turn."""

COMMAND_S = 30.0
COMMANDS_MAX = 8
"""Commands that run at once, in threads of their own: those of a KMS that hangs must not take the
threads of the tracker."""

COMMAND_BYTES_MAX = 64 << 10
AGAIN_S = 10.0
ASK_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Printed:
    """What a command printed, or how it failed, and when, by the monotonic clock."""

    at: float
    identities: tuple[str, ...]
    what: str = ""
    remedy: str = ""

    def get(self) -> tuple[str, ...]:
        """The identities. Raises Unavailable."""
        if not self.identities:
            raise Unavailable(self.what, remedy=self.remedy)
        return self.identities


class SealedKeys:
    """Gives the keys of sealed packages. On the event loop."""

    def __init__(self, control: AccessControl, content: Content, clock: Callable[[], float] = time.monotonic) -> None:
        self._control, self._content, self._clock = control, content, clock
        self._sealed: OrderedDict[Digest, bool] = OrderedDict()
        """Whether a manifest is that of a sealed package."""
        self._configs: OrderedDict[Digest, Mapping[str, WrappedKey]] = OrderedDict()
        """The wrapped keys in the config of a package, by the digest of its manifest."""
        self._reads = JoinedReads("central storage")
        self._unwrapped: OrderedDict[bytes, bytes | None] = OrderedDict()
        """Keys by a hash of the identities and the wrapped key, which names no identity; None where
        none of them opens it."""
        self._printed: dict[tuple[str, ...], _Printed] = {}
        """By command."""
        self._running: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)
        """Is held while a command runs."""
        self._commands = ThreadPoolExecutor(COMMANDS_MAX, thread_name_prefix="identity-command")
        self._turn = asyncio.Lock()
        """Is held while STEP keys are unwrapped."""

    async def is_sealed(self, digest: Digest) -> bool:
        """Whether a manifest is that of a sealed package. Thousands of agents ask for one at a
        moment, sealed or not, so it is decoded once. Raises NotFound, Corrupt, Unavailable."""
        known = self._sealed.get(digest)
        if known is None:
            known = (await self._reads.read(f"manifest {digest}", lambda: self._manifest(digest))).is_sealed
        remember(self._sealed, digest, known, MANIFESTS_MAX)
        return known

    async def _manifest(self, digest: Digest) -> Manifest:
        return await asyncio.to_thread(decode_manifest, await self._content.read(digest))

    async def _wrapped(self, digest: Digest) -> Mapping[str, WrappedKey]:
        """The wrapped keys of a package, by id. Raises NotFound, Corrupt, Unavailable."""
        known = self._configs.get(digest)
        if known is not None:
            self._configs.move_to_end(digest)
            return known
        known = (await self._reads.read(f"config {digest}", lambda: self._config(digest))).keys
        remember(self._configs, digest, known, CONFIGS_MAX)
        while sum(map(len, self._configs.values())) > UNWRAPPED_MAX:
            self._configs.popitem(last=False)
        return known

    async def _config(self, digest: Digest) -> SealedConfig:
        manifest = await self._manifest(digest)
        return await asyncio.to_thread(decode_sealed_config, await self._content.read(manifest.config.digest), manifest)

    async def of(self, name: str, digest: Digest) -> Mapping[str, bytes]:
        """The keys of the package `digest`, which was found under this name, by id. Raises
        NotFound, Refused, Corrupt, Unavailable."""
        rules = self._control.state.rules
        namespace = rules.namespace(name)
        try:
            return await self._keys(rules.sealed[namespace], digest)
        except UsageError as error:  # a mistake of an operator here, not of the host that asks
            raise Unavailable(f"the key of {namespace} cannot be used: {error.what}", remedy=error.remedy) from None

    async def _keys(self, rule: SealedDocument, digest: Digest) -> Mapping[str, bytes]:
        wrapped = await self._wrapped(digest)
        identities = await self._identities(rule, newer_than_s=ASK_S)
        try:
            return await self._unwrap(identities, wrapped)
        except Refused:
            if not rule.identity_command:
                raise
            return await self._unwrap(await self._identities(rule, newer_than_s=AGAIN_S), wrapped)

    async def _unwrap(self, identities: tuple[str, ...], wrapped: Mapping[str, WrappedKey]) -> Mapping[str, bytes]:
        """All keys, by id. Raises Refused at the first one that does not open."""
        names, keys = list(wrapped), dict[str, bytes]()
        for start in range(0, len(names), STEP):
            step = {name: wrapped[name] for name in names[start : start + STEP]}
            hashes = {name: _hash(identities, key) for name, key in step.items()}
            opened = self._remembered(hashes.values())
            if len(opened) < len(set(hashes.values())):
                async with self._turn:
                    opened = self._remembered(hashes.values())
                    missing = {hashes[name]: key for name, key in step.items() if hashes[name] not in opened}
                    opened |= await asyncio.to_thread(_unwrap_all, missing, identities) if missing else {}
                    self._unwrapped.update(opened)  # others may have pushed some of it out meanwhile
            for name, known in hashes.items():
                key = opened[known]
                if key is None:
                    raise unopened(step[name], len(identities))
                self._unwrapped.move_to_end(known)
                keys[name] = key
            while len(self._unwrapped) > UNWRAPPED_MAX:
                self._unwrapped.popitem(last=False)
        return keys

    def _remembered(self, hashes: Iterable[bytes]) -> dict[bytes, bytes | None]:
        return {known: self._unwrapped[known] for known in hashes if known in self._unwrapped}

    async def _identities(self, rule: SealedDocument, *, newer_than_s: float) -> tuple[str, ...]:
        """The identities of a namespace, read from its files, or printed by its command so long ago
        at most."""
        command = rule.identity_command
        if not command:
            return await asyncio.to_thread(self._control.directory.identities, rule.key)
        async with self._running[command]:
            printed = self._printed.get(command)
            limit_s = newer_than_s if printed is not None and printed.identities else AGAIN_S
            if printed is None or self._clock() - printed.at >= limit_s:
                asked = asyncio.get_running_loop().run_in_executor(self._commands, _outcome, command, self._clock)
                printed = self._printed[command] = await asked
        return printed.get()


def _hash(identities: tuple[str, ...], key: WrappedKey) -> bytes:
    return hashlib.sha256("\0".join((key.recipient, key.wrapped, *identities)).encode()).digest()


def _unwrap_all(wrapped: Mapping[bytes, WrappedKey], identities: tuple[str, ...]) -> dict[bytes, bytes | None]:
    """What each opens to, by hash; None where it does not."""
    found = dict[bytes, bytes | None]()
    for known, key in wrapped.items():
        try:
            found[known] = unwrap(key, identities)
        except (Refused, Corrupt):
            found[known] = None
    return found


def _outcome(command: tuple[str, ...], clock: Callable[[], float]) -> _Printed:
    """Run a command."""
    try:
        identities = _printed_by(command)
    except Unavailable as error:
        return _Printed(clock(), (), error.what, error.remedy)
    return _Printed(clock(), identities)


def _printed_by(command: tuple[str, ...]) -> tuple[str, ...]:
    """The identities that a command prints. What it prints is in no message."""
    try:
        code, printed = _run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"took over {COMMAND_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error.strerror)
        raise Unavailable(
            f"the identity-command {command[0]} {why}", remedy="Run it on the tracker's machine"
        ) from None
    if code or len(printed) > COMMAND_BYTES_MAX:
        raise Unavailable(
            f"the identity-command {command[0]} failed with exit code {code}",
            remedy="Run it on the tracker's machine, as the tracker's user",
        )
    identities = identities_in(printed.decode("ascii", "replace"))
    if not identities:
        raise Unavailable(
            f"the identity-command {command[0]} printed no identity", remedy="It prints AGE-SECRET-KEY-1..."
        )
    return identities


def _run(command: tuple[str, ...]) -> tuple[int, bytes]:
    """Exit code and output of a command, which has COMMAND_S with all that it starts. Raises
    OSError and TimeoutExpired."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=dict(os.environ),
    ) as process:
        try:
            printed, _ = process.communicate(timeout=COMMAND_S)
        except BaseException:
            # Also what a script waits for, which would hang on, one more after each attempt.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed
