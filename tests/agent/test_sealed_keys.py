"""Keys of encrypted packages at a tracker: what one package or command costs others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyrage
import pytest
from sealed_rig import (
    SealedSite,
    site_with_keys,  # noqa: F401
)

from p2pdist.agent.sealed_packages import ask_keys
from p2pdist.encryption import new_identity, wrap
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, P2PDistError, Refused, Unavailable
from p2pdist.model.manifest import Descriptor, Manifest, Reference, decode_manifest, encode_manifest
from p2pdist.model.sealed_package import (
    KEYS_MAX,
    SEALED_CONFIG_TYPE,
    SealedConfig,
    WrappedKey,
    decode_sealed_config,
    encode_sealed_config,
)
from tracker.access import sealed_keys as module
from tracker.access.file import SealedDocument
from tracker.access.sealed_keys import SealedKeys
from tracker.core.policy.table import read_table


async def with_keys(site: SealedSite, package: Digest, more: dict[str, WrappedKey]) -> Digest:
    """A package at the origin with further wrapped keys."""
    manifest = decode_manifest(await site.origin.read(package))
    config = decode_sealed_config(await site.origin.read(manifest.config.digest), manifest)
    body = encode_sealed_config(SealedConfig({**config.keys, **more}, config.parts))
    described = Descriptor(SEALED_CONFIG_TYPE, digest_of(body), len(body))
    data = encode_manifest(replace(manifest, config=described))
    for document in (body, data):
        await site.origin.write_document(document)
    return digest_of(data)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def counted(monkeypatch: pytest.MonkeyPatch, first: Callable[[], object] = lambda: None) -> list[int]:
    """How many keys each turn unwrapped. `first` is called in each, in its thread."""
    turns: list[int] = []
    unwrap_all = module._unwrap_all

    def count(wrapped: dict[bytes, WrappedKey], identities: tuple[str, ...]) -> dict[bytes, bytes | None]:
        turns.append(len(wrapped))
        first()
        return unwrap_all(wrapped, identities)

    monkeypatch.setattr(module, "_unwrap_all", count)
    return turns


async def test_a_package_with_many_keys_takes_turns_with_others(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"{number:016x}": wrap(os.urandom(32), site.recipients["team-a"]) for number in range(5 * module.STEP)}
    one = {"0" * 16: wrap(os.urandom(32), site.recipients["team-a"])}
    keys, identities = site.service.access.sealed, site.control.directory.identities("team-a")
    began, go = threading.Event(), threading.Event()
    turns = counted(monkeypatch, lambda: (began.set(), go.wait(30)))
    slow = asyncio.create_task(keys._unwrap(identities, many))
    await asyncio.to_thread(began.wait, 30)
    other = asyncio.create_task(keys._unwrap(identities, one))
    await asyncio.sleep(0)
    go.set()
    assert len(await other) == 1 and len(await slow) == len(many)
    assert turns == [module.STEP, 1] + [module.STEP] * 4, "the other waited for one turn"
    assert await keys._unwrap(identities, many) == await slow and len(turns) == 6, "all of it is remembered"


async def test_a_key_that_does_not_open_is_remembered(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    package = await with_keys(site, pushed.digest, {"0" * 16: wrap(os.urandom(32), new_identity()[1])})
    keys, turns = site.service.access.sealed, counted(monkeypatch)
    for _ in range(3):
        with pytest.raises(Refused, match="none of 1 identities"):
            await keys.of("team-a/p", package)
    assert turns == [2]


async def test_a_key_wrapped_for_dozens_is_refused_before_any_work(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    others = [pyrage.x25519.Recipient.from_str(new_identity()[1]) for _ in range(40)]
    wrapped = base64.b64encode(pyrage.encrypt(os.urandom(32), others)).decode()
    package = await with_keys(site, pushed.digest, {"0" * 16: WrappedKey(site.recipients["team-a"], wrapped)})
    turns = counted(monkeypatch)
    with pytest.raises(Corrupt):
        await site.service.access.sealed.of("team-a/p", package)
    assert not turns and KEYS_MAX <= 1024


async def test_no_failure_holds_an_identity(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question whose keys others push out of memory meanwhile is answered all the same."""
    monkeypatch.setattr(module, "UNWRAPPED_MAX", 4)
    keys = SealedKeys(site.control, site.service.content)
    documents = {key: site.control.directory.identities(key) for key in ("team-a", "team-b")}
    a = {f"{number:016x}": wrap(os.urandom(32), site.recipients["team-a"]) for number in range(3)}
    b = {f"{number:016x}": wrap(os.urandom(32), site.recipients["team-b"]) for number in range(4)}
    await keys._unwrap(documents["team-a"], a)
    unwrap_all, loop = module._unwrap_all, asyncio.get_running_loop()

    def while_others_ask(wrapped: dict[bytes, WrappedKey], identities: tuple[str, ...]) -> dict[bytes, bytes | None]:
        if len(wrapped) == 1:  # the keys of before go meanwhile
            loop.call_soon_threadsafe(keys._unwrapped.clear)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        return unwrap_all(wrapped, identities)

    monkeypatch.setattr(module, "_unwrap_all", while_others_ask)
    again = await keys._unwrap(documents["team-a"], {**a, "f" * 16: wrap(os.urandom(32), site.recipients["team-a"])})
    assert len(again) == 4
    assert len(await keys._unwrap(documents["team-b"], b)) == 4
    assert not any("AGE-SECRET" in repr(known) for known in keys._unwrapped)


async def test_a_command_is_asked_again_after_an_hour_and_after_a_failure(tmp_path: Path, site: SealedSite) -> None:
    script, calls, (first, second) = tmp_path / "kms", tmp_path / "calls", (new_identity()[0], new_identity()[0])
    now = [1000.0]

    def prints(body: str) -> None:
        script.write_text(f"#!/bin/sh\necho x >> {calls}\n{body}\n")
        script.chmod(0o755)

    keys = SealedKeys(site.control, site.service.content, clock=lambda: now[0])
    rule = SealedDocument(identity_command=(str(script),))

    async def ask() -> tuple[str, ...] | P2PDistError:
        try:
            return await keys._identities(rule, newer_than_s=module.ASK_S)
        except Unavailable as error:
            return error

    prints("exit 1")
    failures = await asyncio.gather(*[ask() for _ in range(10)])
    assert all(isinstance(failure, Unavailable) for failure in failures) and calls.read_text() == "x\n"
    prints(f"echo {first}")
    assert isinstance(await ask(), Unavailable), "a failure is remembered for a moment"
    now[0] += module.AGAIN_S
    assert await ask() == (first,)
    prints(f"echo {second}")
    now[0] += module.ASK_S - 1
    assert await ask() == (first,)
    now[0] += 1
    assert await ask() == (second,)
    assert calls.read_text() == "x\n" * 3


async def test_commands_that_hang_take_no_threads_of_the_tracker_and_end_in_time(
    tmp_path: Path, site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that ask a KMS which does not answer, through a script and what that starts."""
    pids, threads = tmp_path / "pids", min(32, (os.cpu_count() or 1) + 4)
    script = tmp_path / "kms"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {pids}\nwait\n")
    script.chmod(0o755)
    keys = SealedKeys(site.control, site.service.content)
    rules = [SealedDocument(identity_command=(str(script), str(number))) for number in range(threads + 1)]
    asked = [asyncio.create_task(keys._identities(rule, newer_than_s=module.ASK_S)) for rule in rules]
    async with asyncio.timeout(60):
        while not pids.exists() or len(pids.read_text().split()) < min(module.COMMANDS_MAX, len(rules)):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(os.getpid)
        assert not any(task.done() for task in asked)
    for task in asked:
        task.cancel()
    children, limit_s, before = list[int](), 0.1, len(pids.read_text().split())
    while len(children) <= before:  # what a script had no time to start cannot be left behind
        monkeypatch.setattr(module, "COMMAND_S", limit_s := 2 * limit_s)
        with pytest.raises(Unavailable, match="took over"):
            await asyncio.wait_for(asyncio.to_thread(module._printed_by, (str(script),)), 60)
        children = [int(pid) for pid in pids.read_text().split()]
    async with asyncio.timeout(60):
        while is_running(children[-1]):  # what init or a test's parent has yet to reap runs no more
            await asyncio.sleep(0.01)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_a_policy_that_keeps_a_package_from_a_zone_keeps_its_keys(site: SealedSite) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    table, mistakes = read_table({"policy": [{"match": "team-a/*", "zones": ["near"]}]})
    assert not mistakes
    far, near = await site.agent("h0", zone="far"), await site.agent("h1", zone="near")
    assert (await site.pull(near, "team-a/p:v1")).error is None
    site.service.fleet.policies.replace(table)
    reference = Reference("team-a/p", digest=pushed.digest)
    assert len(await ask_keys(near.agent.session, reference)) == 1
    with pytest.raises(Refused):
        await ask_keys(far.agent.session, reference)


async def test_a_key_that_is_none_is_the_fault_of_the_tracker(site: SealedSite) -> None:
    """A host waits until an operator has put it right."""
    pushed = await site.push("team-a/p:v1", site.source())
    (file,) = site.control.directory.directory.glob("sealed-team-a-*")
    identity = file.read_text()
    file.write_text("AGE-SECRET-KEY-1WRONG\n")
    with pytest.raises(Unavailable, match=r"the key of team-a/\* cannot be used") as caught:
        await site.service.access.sealed.of("team-a/p", pushed.digest)
    assert "WRONG" not in str(caught.value)
    file.write_text(identity)
    assert len(await site.service.access.sealed.of("team-a/p", pushed.digest)) == 1


async def test_a_tracker_without_pyrage_says_what_to_install(site: SealedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    h = await site.agent("h0")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyrage", None)
        pull = await site.pull(h, "team-a/p:v1")
    assert pull.error is not None and "package pyrage" in pull.error.what and "p2pdist[age]" in pull.error.remedy
    await site.service.access.sealed.of("team-a/p", pushed.digest)
    with monkeypatch.context() as patch:  # from here on agents alone need it, and they do not
        patch.setitem(sys.modules, "pyrage", None)
        assert (await site.pull(h, "team-a/p:v1")).error is None


async def test_a_package_is_decoded_once_for_all_who_ask_for_its_keys(
    site: SealedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = await site.push("team-a/p:v1", site.source())
    decoded: list[bytes] = []

    def decode(data: bytes, manifest: Manifest) -> SealedConfig:
        decoded.append(data)
        return decode_sealed_config(data, manifest)

    monkeypatch.setattr(module, "decode_sealed_config", decode)
    keys = site.service.access.sealed
    first, *others = await asyncio.gather(*[keys.of("team-a/p", pushed.digest) for _ in range(50)])
    assert await keys.of("team-a/p", pushed.digest) == first and all(other == first for other in others)
    assert len(decoded) == 1
    monkeypatch.setattr(module, "UNWRAPPED_MAX", 3)
    more = {f"{number:016x}": wrap(os.urandom(32), site.recipients["team-a"]) for number in range(2)}
    await keys.of("team-a/p", await with_keys(site, pushed.digest, more))
    assert len(keys._configs) == 1, "others make room for one with many keys"
