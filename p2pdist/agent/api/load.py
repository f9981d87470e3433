"""What programs of this host ask that load weights: which files a model has, and where in the store
the bytes of a blob are, once they are there and verified.

The answer names the store's own file, so that all programs of a host map the same pages. Whoever
may use the socket may read the store's files too (store/layout.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial

from aiohttp import web

from p2pdist.agent.agent import Agent
from p2pdist.agent.api.guard import caller_of, require_digest, require_reference
from p2pdist.agent.bodies import Brought, gone_again, held
from p2pdist.agent.caller import Caller
from p2pdist.agent.pull.blob import BlobPull
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import NotFound, UsageError
from p2pdist.model.hub import HubReference, is_hub, parse_hub
from p2pdist.model.image import is_image
from p2pdist.model.manifest import parse_reference
from p2pdist.model.messages import BlobFile, ModelFile, ModelFiles
from p2pdist.model.modelpack import is_model, model_layers
from p2pdist.store.blobs.blob import Blob

WEIGHTS = ".safetensors"
"""How files end that are only given as blobs."""

DEMAND_BYTES_MAX = 4 << 20
"""Bytes at the front of what a program waits for that come before all others."""


async def blob_file(agent: Agent, request: web.Request) -> BlobFile:
    """Where a blob's bytes are. Raises UsageError and what pulling raises."""
    digest, model = parse_digest(request.match_info["digest"]), request.query.get("model", "")
    if model:
        require_reference(agent, request, model)
    else:
        require_digest(agent, request, digest)
    start, end = (_number(request.query.get(name, "0"), name) for name in ("start", "end"))
    find = partial(_hub_blob, agent, model) if model else partial(_blob, agent, caller_of(request))
    with contextlib.ExitStack() as stack:
        blob, fetching = await held(stack, digest, partial(find, digest))
        if not start <= end <= blob.layout.size:
            raise UsageError(f"{digest} has {blob.layout.size} bytes, not {start} to {end}")
        if fetching is not None and start < end:
            await _wait(fetching, start, end)
        path, inode = await asyncio.to_thread(_place, blob)
        here = blob.layout.size if blob.complete else _held_until(blob, end)
    return BlobFile(path, blob.layout.size, here, inode)


def _place(blob: Blob) -> tuple[str, int]:
    """Path and inode of the file of a blob that is held. In a thread."""
    return str(blob.path.resolve()), os.fstat(blob.fileno()).st_ino


async def _blob(agent: Agent, caller: Caller, digest: Digest) -> Brought:
    """A blob, which is pulled for `caller` where it is missing, and its pull while that runs."""
    await asyncio.to_thread(agent.store.integrity.look, [digest])
    blob, fetching = agent.store.get(digest), None
    if blob is None or not blob.complete:
        fetching = agent.registry.fetching(digest) or await agent.pulls.blob(digest, caller)
        blob = fetching.blob if fetching is not None else agent.store.get(digest)
    if blob is None:
        raise gone_again(digest)
    return blob, fetching


async def _hub_blob(agent: Agent, model: str, digest: Digest) -> Brought:
    """A file of a model of the hub, which is fetched from there where it is missing, and its pull
    while that runs. Raises NotFound where the model has no such file."""
    if not is_hub(model):
        raise UsageError(f"{model[:200]} is no model of a hub", remedy="Leave the name of the model out")
    await asyncio.to_thread(agent.store.integrity.look, [digest])
    snapshot = await agent.models.find(parse_hub(model))
    if digest not in {blob.digest for blob in snapshot.blobs}:
        raise NotFound(f"{model[:200]} has no file {digest}")
    return await snapshot.fetch(digest, "start")


async def _wait(fetching: BlobPull, start: int, end: int) -> None:
    """Wait until bytes are there and verified, the first of them before all others."""
    body, layout = fetching.body(), fetching.blob.layout
    if fetching.vouched is None:
        await fetching.demand(layout.covering(start, min(end, start + DEMAND_BYTES_MAX)))
    for piece in layout.covering(start, end):
        await body.piece(piece)
    await body.proven()


def _held_until(blob: Blob, end: int) -> int:
    """How far behind `end` everything is here as well."""
    if blob.vouched is not None:
        return end
    layout = blob.layout
    piece = -(-end // layout.piece_size)
    while piece < layout.count and piece in blob.have:
        piece += 1
    return max(end, min(layout.size, layout.offset(piece)))


async def model_files(agent: Agent, request: web.Request) -> ModelFiles:
    """The files of a model, whose pull is begun. Raises UsageError for what is no model, and what
    finding a package raises."""
    reference = request.query.get("reference", "")
    require_reference(agent, request, reference)
    if is_hub(reference):
        return await _hub_files(agent, reference)
    if is_image(reference):
        package = await agent.pulls.package(
            reference, caller_of(request)
        )  # nothing of it counts before it has matched as a whole
    else:
        package = await agent.packages.find(parse_reference(reference), lambda _: None)
        if package.manifest.is_sealed:  # its files are known once it is open
            package = await agent.pulls.package(reference, caller_of(request))
    if not is_model(package.manifest):
        raise UsageError(
            f"{reference[:200]} is no model whose files are blobs",
            remedy="Mount it, and name the path of a file; or pack it with --format modelpack",
        )
    files = [
        ModelFile(layer.path.decode(), layer.blob.digest, layer.blob.size)
        for layer in model_layers(package.manifest.layers)
        if layer.form == "raw"
    ]
    return ModelFiles(str(package.reference), package.digest, files)


async def _hub_files(agent: Agent, reference: str) -> ModelFiles:
    """The files of a model of the hub that are blobs. Its reference names the commit."""
    asked = parse_hub(reference)
    snapshot = await agent.models.find(asked)
    found = snapshot.files.values()
    if small := next((file for file in found if file.path.endswith(WEIGHTS) and not file.sha256), None):
        raise UsageError(
            f"{small.path[:300]} of {asked.name} is not kept in LFS, and no blob",
            remedy="Download it with HF_ENDPOINT=http://localhost:7073/hf, and name the path",
        )
    files = [ModelFile(file.path, file.digest, file.size) for file in found if file.sha256]
    return ModelFiles(str(HubReference(asked.name, snapshot.commit)), None, files)


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise UsageError(f"{text[:50]!r} is no number of bytes for {name}")
    return int(text)
