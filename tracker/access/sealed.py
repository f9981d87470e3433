"""Keys of sealed packages, for hosts that may read them.

A namespace of the access file has a key: age identities in files, or printed by a command. By them
the tracker unwraps the keys in the config of a package (p2pdist/model/sealed.py). Only identities
of the namespace in which the package was found are tried, so the wrapped key of another namespace
does not open, under whatever name a manifest repeats it.

Identities and keys are in the memory of the tracker alone. A command runs at the first question,
and again where what it printed does not open a key, at most every AGAIN_S.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from p2pdist.model.digest import Digest
from p2pdist.model.errors import Refused, Unavailable
from p2pdist.model.manifest import decode_manifest
from p2pdist.model.sealed import WrappedKey, decode_sealed_config
from p2pdist.sealing import identities_in, unwrap
from tracker.access.control import AccessControl
from tracker.access.file import SealedDocument
from tracker.content import Content

UNWRAPPED_MAX = 10_000
"""Keys that are remembered, those that were asked for last."""

COMMAND_S = 30.0
COMMAND_BYTES_MAX = 64 << 10
AGAIN_S = 10.0


class SealedKeys:
    """Gives the keys of sealed packages. On the event loop."""

    def __init__(self, control: AccessControl, content: Content) -> None:
        self._control, self._content = control, content
        self._unwrapped: OrderedDict[tuple[tuple[str, ...], WrappedKey], bytes] = OrderedDict()
        """By the identities that opened it, and the wrapped key."""
        self._printed: dict[tuple[str, ...], tuple[float, tuple[str, ...]]] = {}
        """What each command printed, and when, by the monotonic clock."""
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By namespace: a command may take long."""

    async def of(self, name: str, digest: Digest) -> Mapping[str, bytes]:
        """The keys of the package `digest`, which was found under this name, by id. Raises
        NotFound, Refused, Corrupt, Unavailable."""
        rules = self._control.state.rules
        namespace = rules.namespace(name)
        rule = rules.sealed[namespace]
        manifest = decode_manifest(await self._content.read(digest))
        config = decode_sealed_config(await self._content.read(manifest.config.digest), manifest)
        async with self._asking[namespace]:
            try:
                return await self._unwrap(rule, config.keys, fresh=False)
            except Refused:
                if not rule.identity_command:
                    raise
                return await self._unwrap(rule, config.keys, fresh=True)

    async def _unwrap(
        self, rule: SealedDocument, wrapped: Mapping[str, WrappedKey], *, fresh: bool
    ) -> Mapping[str, bytes]:
        identities = await self._identities(rule, fresh=fresh)
        missing = [key for key in wrapped.values() if (identities, key) not in self._unwrapped]
        for key, opened in zip(missing, await asyncio.to_thread(_unwrap_all, missing, identities), strict=True):
            self._unwrapped[identities, key] = opened
        keys = {name: self._unwrapped[identities, key] for name, key in wrapped.items()}
        for key in wrapped.values():
            self._unwrapped.move_to_end((identities, key))
        while len(self._unwrapped) > UNWRAPPED_MAX:
            self._unwrapped.popitem(last=False)
        return keys

    async def _identities(self, rule: SealedDocument, *, fresh: bool) -> tuple[str, ...]:
        command = rule.identity_command
        if not command:
            return await asyncio.to_thread(self._control.directory.identities, rule.key)
        at, printed = self._printed.get(command, (-AGAIN_S, ()))
        if not printed or (fresh and time.monotonic() - at >= AGAIN_S):
            printed = await asyncio.to_thread(_printed_by, command)
            self._printed[command] = time.monotonic(), printed
        return printed


def _unwrap_all(wrapped: list[WrappedKey], identities: tuple[str, ...]) -> list[bytes]:
    return [unwrap(key, identities) for key in wrapped]


def _printed_by(command: tuple[str, ...]) -> tuple[str, ...]:
    """The identities that a command prints. What it prints is in no message."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False, env=dict(os.environ)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"took over {COMMAND_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error.strerror)
        raise Unavailable(
            f"the identity-command {command[0]} {why}", remedy="Run it on the tracker's machine"
        ) from None
    if done.returncode or len(done.stdout) > COMMAND_BYTES_MAX:
        raise Unavailable(
            f"the identity-command {command[0]} failed with exit code {done.returncode}",
            remedy="Run it on the tracker's machine, as the tracker's user",
        )
    identities = identities_in(done.stdout.decode("ascii", "replace"))
    if not identities:
        raise Unavailable(
            f"the identity-command {command[0]} printed no identity", remedy="It prints AGE-SECRET-KEY-1..."
        )
    return identities
