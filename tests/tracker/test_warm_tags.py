"""Tags kept warm, with a real layout and database: what cannot be ordered keeps nothing else from
being so."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tomllib
from pathlib import Path

import programs
from waits import until

from p2pdist.origin.drivers import open_origin
from tracker.content import Content
from tracker.core.fleet import Fleet
from tracker.core.policy.table import read_table
from tracker.preseed_service import PreseedService
from tracker.service import Service
from tracker.state.preseeds import PreseedDatabase
from tracker.warm_tags import WarmTags


def command(*words: object) -> None:
    programs.run(*words, check=True)


async def test_a_tag_whose_package_cannot_be_read_does_not_keep_others_cold(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    for name in ("bad", "good"):
        (tmp_path / name).write_bytes(os.urandom(1000))
        command("blob", "push", tmp_path / name, "--origin", origin.as_uri())
    for name in ("bad", "good"):
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        command("tag", f"blob:sha256-{digest}", f"{name}:prod", "--origin", origin.as_uri())
    index = json.loads((origin / "index.json").read_text())
    manifests = {
        each["annotations"]["org.opencontainers.image.ref.name"]: each["digest"] for each in index["manifests"]
    }
    (origin / "blobs" / "sha256" / manifests["bad:prod"].removeprefix("sha256:")).write_bytes(b"{}")

    policy = '[[policy]]\nmatch = "{0}"\n[policy.warm]\ncount = 1\n'
    table, mistakes = read_table(tomllib.loads(policy.format("bad:prod") + policy.format("good:prod")))
    assert mistakes == []
    opened = open_origin(origin.as_uri())
    service = Service(Fleet(started_at=0.0), Content(opened))
    service.fleet.policies.replace(table)
    preseeds = PreseedService(service, PreseedDatabase(""))
    await preseeds.load()
    warm_tags = asyncio.create_task(WarmTags(service.fleet.policies, service.content, preseeds).run())
    try:
        await until(lambda: len(preseeds.core.by_id) == 1)
        assert next(iter(preseeds.core.by_id.values())).record.package == f"good@{manifests['good:prod']}"
    finally:
        warm_tags.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await warm_tags
        await preseeds.stop()
        await opened.close()
