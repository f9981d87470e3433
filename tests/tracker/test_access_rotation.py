"""Rotation of a fleet's authority and signing key, changes of the access file, the audit, and what
lies in the directory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import programs
import pytest
from access_rig import AccessSite, access_site, ask
from ports import free_port

from p2pdist.cli.verbs import access as access_verb
from p2pdist.credentials.authority import TRACKER_DNS, make_key, make_request, pinned, split_pem
from p2pdist.credentials.tokens import TokenRecord
from p2pdist.model.access import decode_ticket
from p2pdist.model.errors import NotFound, P2PDistError, Unauthenticated, UsageError
from p2pdist.model.messages import Access, Assign, Holding, Reject, RenewRequest
from p2pdist.transfer.audit import audit_to
from tracker.access.control import AccessControl
from tracker.access.directory import SUPERSEDED_S, AccessDirectory
from tracker.access.file import REVOKED_MAX, TEMPLATE, read_rules
from tracker.access.tls import TrackerTls


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with access_site(tmp_path) as found:
        yield found


def made(tmp_path: Path) -> AccessDirectory:
    directory = AccessDirectory(tmp_path / "access" / "access.toml")
    directory.prepare(now=time.time())
    return directory


def test_everything_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    directory = made(tmp_path)
    files = {path: path.read_bytes() for path in directory.directory.iterdir()}
    assert sorted(path.name.partition("-")[0] for path in files) == [
        "access.toml",
        "authority",
        "authority",
        "join",
        "signing",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(directory.directory.stat().st_mode) == 0o700
    state = directory.load(now=time.time())
    assert directory.prepare(now=time.time()) == []
    assert {path: path.read_bytes() for path in directory.directory.iterdir()} == files
    token = directory.join_token("default").read_text()
    assert state.authorities[0].fingerprint in token and state.rules.joins["default"].secret_sha256 not in token


def test_the_file_that_is_made_states_what_its_comments_say() -> None:
    rules = read_rules(TEMPLATE.encode(), "access.toml")
    commented = "\n".join(
        line.removeprefix("# ")
        if line.startswith(
            (
                "# [",
                "# authorities",
                "# read",
                '# "',
                "# mount",
                "# issuer",
                "# aud",
                "# map",
                "# key",
                "# required",
                "# identity",
            )
        )
        else line
        for line in TEMPLATE.splitlines()
    )
    full = read_rules(commented.encode(), "access.toml")
    assert rules.joins == full.joins and full.local.mount_roots and full.oidc is not None
    assert [bool(rule.key) for rule in full.sealed.values()] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fleet = 1",
        'fleet = "UPPER"',
        'fleet = "a"\nunknown = 1',
        'fleet = "a"\nnetworks = ["10.0.0.1/8"]',
        'fleet = "a"\n[role.x]\nmay = ["root"]',
        'fleet = "a"\n[role.x]\nread = ["team/tr*"]',
        'fleet = "a"\n[join."A b"]',
        'fleet = "a"\nrevoked = ["h1"]',
        'fleet = "a"\n[local]\n"team" = ["*"]',
        'fleet = "a"\n[local]\nmount-roots = ["../x"]',
        'fleet = "a"\n[oidc]\nissuer = "http://x"\naudience = "a"\nmap = {}',
        "\xff",
        "fleet = " + "[" * 10_000,
    ],
)
def test_a_mistake_in_the_file_names_its_place(text: str) -> None:
    with pytest.raises(UsageError, match=r"access\.toml"):
        read_rules(text.encode("latin-1"), "access.toml")


def test_keys_that_others_may_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = made(tmp_path)
    directory.join_token("default").chmod(0o644)
    directory.load(now=time.time())
    assert "join-default.token may be read by others" in caplog.text


def test_a_directory_that_has_everything_may_be_read_only(entered_path: Path) -> None:
    directory = made(entered_path)
    program = (
        "import os, sys, time; from pathlib import Path; os.setuid(65534) if os.getuid() == 0 else None\n"
        "from tracker.access.control import AccessControl\n"
        "print(AccessControl(Path(sys.argv[1])).state.rules.fleet)"
    )
    for path in (directory.directory, *directory.directory.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o444)
    ran = subprocess.run([sys.executable, "-c", program, str(directory.path)], capture_output=True, text=True)
    assert ran.stdout == "p2pdist\n", ran.stderr


@pytest.mark.root
def test_what_root_makes_belongs_to_the_tracker(tmp_path: Path) -> None:
    directory = made(tmp_path)
    for path in (directory.directory, *directory.directory.iterdir()):
        os.chown(path, 65534, 65534)
    directory.rotate(now=time.time())
    directory.set_revoked(["host:h1"])
    directory.note_token(TokenRecord("id", "role", "name", 0.0, 1.0))
    assert {path.stat().st_uid for path in directory.directory.iterdir()} == {65534}


def test_keys_go_two_days_after_they_were_superseded(tmp_path: Path) -> None:
    directory, now = made(tmp_path), time.time()
    first = directory.load(now=now)
    directory.rotate(now=now)
    second = directory.load(now=now)
    assert second.authorities[1].fingerprint == first.authorities[0].fingerprint
    assert [key.name for key in second.signing][1:] == [key.name for key in first.signing]
    assert second.authorities[0].fingerprint in directory.join_token("default").read_text()
    assert second.rules.joins == first.rules.joins  # the secret stays
    later = directory.load(now=now + SUPERSEDED_S + 10)
    assert len(later.authorities) == len(later.signing) == 1
    removed = directory.rotate(now=now + SUPERSEDED_S + 10)
    assert len(removed) == 2 and len(list(directory.directory.glob("authority-*.key"))) == 2


def test_a_rotation_supersedes_keys_that_were_dated_by_a_clock_ahead(tmp_path: Path) -> None:
    """Else the keys of before would sign on, and what an operator rotated for would be of use."""
    directory, now = AccessDirectory(tmp_path / "access" / "access.toml"), time.time()
    directory.prepare(now=now + 30 * 86400)
    directory.new_identity("team-a", now=now + 30 * 86400)
    before, identity = directory.load(now=now), directory.identities("team-a")[0]
    directory.rotate(now=now)
    directory.new_identity("team-a", now=now)
    after = directory.load(now=now)
    assert [key.name for key in after.signing][1:] == [key.name for key in before.signing]
    assert [each.fingerprint for each in after.authorities][1:] == [each.fingerprint for each in before.authorities]
    assert after.authorities[0].fingerprint in directory.join_token("default").read_text()
    assert after.authorities[0].certificate.not_valid_before_utc.timestamp() < now
    assert directory.identities("team-a")[1:] == (identity,)
    for path in directory.directory.iterdir():
        os.utime(path, (now - SUPERSEDED_S - 10,) * 2)
    two_days_later = directory.load(now=now)
    assert [key.name for key in two_days_later.signing] == [after.signing[0].name]
    assert [each.fingerprint for each in two_days_later.authorities] == [after.authorities[0].fingerprint]
    assert len(directory.rotate(now=now)) == 2 and len(directory.load(now=now).signing) == 2


def test_a_key_that_two_others_superseded_ends_as_the_earlier_of_their_times_says(tmp_path: Path) -> None:
    """A rotation while the clock is ahead dates the file and its change alike; the next rotation
    tells that the one before it was made."""
    directory, now = AccessDirectory(tmp_path / "access" / "access.toml"), time.time()
    directory.prepare(now=now - 10)
    directory.rotate(now=now + 30 * 86400)
    for path in directory.directory.iterdir():
        os.utime(path, (now + 30 * 86400,) * 2)
    assert len(directory.load(now=now).signing) == 2
    directory.rotate(now=now)
    assert len(directory.load(now=now).signing) == 3
    later = directory.load(now=now + SUPERSEDED_S + 60)
    assert len(later.signing) == len(later.authorities) == 1


def test_revocations_of_one_moment_all_count(tmp_path: Path) -> None:
    directory = made(tmp_path)
    hosts = [f"host:h{number}" for number in range(16)]
    with ThreadPoolExecutor(len(hosts)) as pool:
        ready = threading.Barrier(len(hosts))

        def revoke(host: str) -> None:
            ready.wait()
            access_verb.revoke.callback((host,), directory.path)  # type: ignore[misc]

        list(pool.map(revoke, hosts))
    assert sorted(directory.revoked()) == sorted(hosts)
    assert directory.load(now=time.time()).rules.revoked == set(hosts)


def test_no_more_is_revoked_than_a_tracker_takes(tmp_path: Path) -> None:
    directory = made(tmp_path)
    directory.path.write_text(directory.path.read_text().replace("revoked = []", 'revoked = ["host:a", "host:b"]'))
    directory.set_revoked(f"host:h{number}" for number in range(REVOKED_MAX - 2))
    with pytest.raises(UsageError, match="nothing changed"):
        directory.change_revoked(lambda revoked: [*revoked, "host:c"])
    assert len(directory.load(now=time.time()).rules.revoked) == REVOKED_MAX
    directory.change_revoked(lambda revoked: [*revoked, "host:a"])
    (directory.directory / "revoked.txt").write_text("".join(f"host:h{number}\n" for number in range(REVOKED_MAX)))
    directory.change_revoked(lambda revoked: revoked[1:])  # the way back
    assert len(directory.revoked()) == REVOKED_MAX - 1


def test_a_token_that_cannot_be_noted_spoils_no_list(tmp_path: Path) -> None:
    directory, record = made(tmp_path), TokenRecord("id", "role", "name", 0.0, 1.0)
    directory.note_token(record)
    size, limits = (directory.directory / "tokens.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # as on a disk that fills up meanwhile
    try:
        with pytest.raises(P2PDistError):
            directory.note_token(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert directory.tokens() == [record]
    directory.note_token(record)
    assert directory.tokens() == [record, record]


def test_the_tracker_has_another_certificate_once_its_clock_is_right(tmp_path: Path) -> None:
    """One that was made by a clock that was ahead is not valid yet: no client would take it for as
    long as that."""
    state, now = made(tmp_path).load(now=time.time()), time.time()
    tls = TrackerTls(["127.0.0.1"])
    tls.use(state, now=now + 5 * 86400)
    ahead = tls.client
    tls.renew(state, now=now)
    assert tls.client is not ahead
    right = tls.client
    tls.renew(state, now=now + 1.0)
    assert tls.client is right


async def test_a_rotation_breaks_no_session_and_no_client_that_knows_the_former_authority(site: AccessSite) -> None:
    old_token, old_bundle = site.join_token(), await site.authorities()
    ops_token = site.token("ops")
    agent = await site.join("h1")
    session = await agent.session()
    await session.hear(Access)
    site.control.directory.rotate(now=time.time())
    told = await session.hear(Access)
    assert len(split_pem(told.authorities.encode())) == 2 and len(told.keys) == 2
    newest = site.control.state.authorities[0]
    # The old pin, the old certificate, the old token, and a new host with the new pin.
    await site.join("h2", token=old_token)
    await ask(site.client(site.trusting(old_bundle)), "GET", "/healthz")
    await ask(site.client(site.trusting(newest.pem)), "GET", "/healthz")
    joined = await site.join("h3")
    assert newest.fingerprint in str(site.join_token())
    for each in (agent, joined):
        http = site.client(each.context)
        await ask(http, "POST", "/v1/renew", RenewRequest(make_request(make_key()).decode()))
    await ask(await site.stranger(ops_token), "GET", "/v1/hosts")
    await session.say(Holding(site.layers["team-a/x:v1"], 200_000, 65536, (0,)))
    assert decode_ticket((await session.hear(Assign)).ticket, lambda *_: True).key == site.control.state.signing[0].name


async def test_an_authority_that_is_gone_is_trusted_no_longer(site: AccessSite) -> None:
    agent, token = await site.join("h1"), site.token("ops")
    session = await agent.session()
    await session.hear(Access)
    directory = site.control.directory
    directory.rotate(now=time.time())
    await session.hear(Access)
    for kind in ("authority-*", "signing-*"):
        old = sorted(directory.directory.glob(kind))[: 2 if kind.startswith("a") else 1]
        for path in old:
            path.unlink()
    told = await session.hear(Access)
    while len(told.keys) > 1 or len(split_pem(told.authorities.encode())) > 1:
        told = await session.hear(Access)
    newest = site.trusting(site.control.state.authorities[0].pem)
    agent.context.load_verify_locations(cadata=site.control.state.authorities[0].pem.decode())
    with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
        await ask(site.client(agent.context), "GET", "/healthz")
    with pytest.raises(Unauthenticated):
        await ask(site.client(newest, token), "GET", "/v1/hosts")


async def test_a_file_with_a_mistake_changes_nothing(site: AccessSite, caplog: pytest.LogCaptureFixture) -> None:
    agent = await site.join("h1")
    session = await agent.session()
    await session.hear(Access)
    good = site.path.read_text()
    site.path.write_text("fleet = ")
    async with asyncio.timeout(60):
        while "access stays as it was" not in caplog.text:
            await asyncio.sleep(0.05)
    await ask(agent.http, "GET", "/v1/resolve?reference=team-b/y:v1")
    site.path.write_text(good.replace('public = ["public/*"]', 'public = ["team-b/*"]'))
    assert (await session.hear(Access)).public == ("team-b/*",)


@pytest.mark.parametrize("whole", [False, True])
async def test_files_that_vanish_change_nothing_and_none_is_made_in_their_place(
    site: AccessSite, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As while an editor writes the file anew, or where a volume is gone for a moment: the rules of
    the template are for everything, and another authority would part the tracker from its
    agents."""
    agent, directory, aside = await site.join("h1"), site.path.parent, site.path.parent.with_name("aside")
    session = await agent.session()
    before = (await session.hear(Access)).authorities
    if whole:
        directory.rename(aside)
        directory.mkdir()
    else:
        site.path.rename(aside)
    async with asyncio.timeout(60):
        while "access stays as it was" not in caplog.text:
            await asyncio.sleep(0.05)
    assert list(directory.glob("*.toml")) == []
    await ask(agent.http, "GET", "/v1/resolve?reference=team-b/y:v1")
    if whole:
        directory.rmdir()
        aside.rename(directory)
    else:
        aside.rename(site.path)
    site.path.write_text(site.path.read_text().replace('public = ["public/*"]', 'public = ["team-b/*"]'))
    told = await session.hear(Access)
    assert told.public == ("team-b/*",) and told.authorities == before


async def test_revocations_whose_file_vanishes_are_not_lifted(site: AccessSite) -> None:
    """As while an editor writes the file anew. The command that lifts the last one leaves an empty
    file."""
    agent, directory = await site.join("h1"), site.control.directory
    session, file = await agent.session(), directory.directory / "revoked.txt"
    await session.hear(Access)
    directory.set_revoked(["host:h2"])
    assert (await session.hear(Access)).revoked == ("host:h2",)
    file.rename(file.with_name("aside"))
    site.path.write_text(site.path.read_text().replace('public = ["public/*"]', 'public = ["team-b/*"]'))
    told = await session.hear(Access)
    while told.public != ("team-b/*",):
        assert told.revoked == ("host:h2",)
        told = await session.hear(Access)
    assert told.revoked == ("host:h2",)
    file.with_name("aside").rename(file)
    directory.set_revoked([])
    assert (await session.hear(Access)).revoked == ()


async def test_narrower_patterns_hold_for_sessions_that_are_open(site: AccessSite) -> None:
    agent = await site.join("h1")
    session = await agent.session()
    await session.hear(Access)
    await ask(agent.http, "GET", "/v1/packages?reference=team-b/y:v1")
    site.path.write_text(
        site.path.read_text().replace('[join.default]\nread = ["*"]', '[join.default]\nread = ["team-a/*"]\n[join.c]')
    )
    with pytest.raises(NotFound):
        for _ in range(1200):
            await ask(agent.http, "GET", "/v1/packages?reference=team-b/y:v1")
            await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await session.say(Holding(site.layers["team-b/y:v1"], 200_000, 65536, (0,)))
        assert (await session.hear(Reject)).blob == site.layers["team-b/y:v1"]


async def test_the_audit_tells_joins_changes_and_refusals_without_secrets(tmp_path: Path) -> None:
    handler, logger = audit_to(tmp_path / "audit"), logging.getLogger("p2pdist.audit")
    async with access_site(tmp_path) as site:
        await site.join("h1")
        ops, stranger = await site.stranger(token := site.token("ops", name="me")), await site.stranger()
        await ask(ops, "PUT", "/v1/preseeds/job-1", {"package": "team-a/x:v1", "count": 1})
        await ask(ops, "DELETE", "/v1/preseeds/job-1")
        for _ in range(30):
            with pytest.raises(P2PDistError):
                await ask(stranger, "GET", "/v1/hosts")
        secret = site.join_token().secret
        metrics = (await ask(ops, "GET", "/metrics")).decode()
    handler.close()
    logger.handlers, logger.propagate = [], True
    text = (tmp_path / "audit").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["event"] for event in events][:3] == ["join", "preseed", "cancel"]
    assert sum(event["event"] == "refusal" for event in events) == 10
    order = events[1]
    assert (order["identity"], order["object"], order["right"], order["outcome"]) == (
        "token:me",
        "preseed:job-1",
        "preseed",
        "done",
    )
    assert order["credential"].startswith("token:") and order["request_id"] and order["address"] == "127.0.0.1"
    assert secret not in text and token[70:] not in text
    assert 'p2pdist_tracker_refused_total{right="watch"} 30.0' in metrics
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


def command(*words: str, check: bool = True) -> str:
    ran = programs.run(*words)
    assert not check or ran.returncode == 0, ran.stderr
    return ran.stdout if check else ran.stderr


async def test_a_tracker_process_with_its_verbs(tmp_path: Path) -> None:
    port, probe, access = free_port(), free_port(), str(tmp_path / "access" / "access.toml")
    words = ["tracker", "--listen", f"127.0.0.1:{port}", "--access", access, "--probe-listen", f"127.0.0.1:{probe}"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = programs.start(*words, "--no-discovery", stderr=file, stdout=file)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while True:
                try:
                    async with http.get(f"http://127.0.0.1:{probe}/readyz") as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
            async with http.get(f"http://127.0.0.1:{probe}/v1/hosts") as answer:
                assert answer.status == 404
            token = command(
                "token", "create", "--access", access, "--role", "operator", "--ttl", "1d", "--name", "me"
            ).strip()
            pin = token.split(".")[1]
            async with http.get(f"https://127.0.0.1:{port}/v1/access/authorities", ssl=False) as answer:
                context = ssl.create_default_context(cadata=pinned(await answer.read(), pin).decode())
            headers = {"Authorization": f"Bearer {token}"}
            url = f"https://127.0.0.1:{port}/v1/hosts"
            async with http.get(url, headers=headers, ssl=context, server_hostname=TRACKER_DNS) as answer:
                assert answer.status == 200
            async with http.get(url, headers=headers, ssl=context) as answer:  # by the address in its certificate
                assert answer.status == 200
            listed = json.loads(command("token", "list", "--access", access, "--json"))
            assert [(row["role"], row["name"], row["revoked"]) for row in listed] == [("operator", "me", False)]
            command("token", "revoke", listed[0]["id"], "--access", access)
            while answer.status == 200:  # the tracker looks every second
                await asyncio.sleep(0.05)
                async with http.get(url, headers=headers, ssl=context) as answer:
                    pass
            assert answer.status == 401
            command("access", "rotate", "--access", access)
            newest = max((tmp_path / "access").glob("authority-*.pem")).read_text()
            for trusted in (ssl.create_default_context(cadata=newest), context):
                while True:  # the tracker looks every second
                    try:
                        async with http.get(url, ssl=trusted, server_hostname=TRACKER_DNS) as answer:
                            assert answer.status == 401
                            break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.05)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
    secret = (tmp_path / "access" / "join-default.token").read_text().strip()
    assert secret not in log.read_text() and "access control is off" not in log.read_text()
    shown = json.loads(command("access", "show", "--access", access, "--json"))
    assert shown["revoked"] == [f"token:{listed[0]['id']}"] and secret.rpartition(".")[2] not in str(shown)
    command("access", "revoke", "host:h1", "--access", access)
    command("access", "unrevoke", "host:h1", f"token:{listed[0]['id']}", "--access", access)
    assert json.loads(command("access", "show", "--access", access, "--json"))["revoked"] == []
    assert "cannot be revoked" in command("access", "revoke", "h1", "--access", access, check=False)
    assert "no role" in command("token", "create", "--role", "x", "--ttl", "1d", "--access", access, check=False)
    assert len(json.loads(command("access", "rotate", "--access", access, "--json"))["tokens_ending"]) == 1
    assert len(list((tmp_path / "access").glob("authority-*.pem"))) == 3


@pytest.mark.parametrize(("listen", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_tracker_without_access_says_so_where_others_reach_it(tmp_path: Path, listen: str, warns: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pdist.cli.main", "tracker", "--listen", f"{listen}:{free_port()}", "--no-discovery"),
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    text = b""
    async with asyncio.timeout(60):
        while b"listening on" not in text:
            text += await process.stderr.readline()
    process.terminate()
    await process.communicate()
    assert (b"access control is off" in text and b"--access" in text) == warns


def test_several_trackers_that_start_at_once_make_one_fleet(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "access.toml"
    program = (
        "import sys; from pathlib import Path; from tracker.access.control import AccessControl\n"
        "print(AccessControl(Path(sys.argv[1])).state.authorities[0].fingerprint)"
    )
    words = [sys.executable, "-c", program, str(path)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert AccessControl(path).made == [] and len(os.listdir(path.parent)) == 5
