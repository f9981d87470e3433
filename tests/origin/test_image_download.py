"""An image straight from a registry that behaves badly into a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from image_rig import Made, Odd, make_image, make_index

from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import Corrupt, NotFound, Unavailable
from p2pdist.model.image import parse_image
from p2pdist.model.platform import parse_platform
from p2pdist.model.upstream import parse_upstream
from p2pdist.origin.registry.download import download_image
from p2pdist.origin.registry.upstream import UpstreamRegistry

AMD64 = parse_platform("linux/amd64")[0]


def published(odd: Odd) -> Made:
    image = make_image({"data": bytes(range(256)) * 8000}, {"more": b"m"}, compressions=("plain", "gzip"))
    for made in (image, make_index({"amd64": image})):
        odd.put("team/app", "v1", made)
    return image


async def download(odd: Odd, folder: Path) -> None:
    folder.mkdir()
    registry = UpstreamRegistry(parse_upstream(odd.address))
    try:
        reference = parse_image(f"docker://{odd.address}/team/app:v1")
        await download_image(reference, registry.repository("team/app"), AMD64, folder)
    finally:
        await registry.close()


@pytest.mark.parametrize(("ranges", "breaks_at"), [(True, 3), (False, 3), (True, 12)])
async def test_what_breaks_off_is_asked_for_from_there(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool, breaks_at: int
) -> None:
    """However often, where much comes each time: a proxy may end what takes long."""
    monkeypatch.setattr("p2pdist.origin.registry.download.ADVANCE_BYTES", 100_000)
    image = published(odd)
    victim = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    data, broken = image.blobs[victim], 0

    async def breaks(request: web.Request) -> web.StreamResponse:
        nonlocal broken
        if broken < breaks_at:
            broken += 1
            start = (request.http_range.start or 0) if ranges else 0
            partial = ranges and "Range" in request.headers
            stated = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if partial else {}
            response = web.StreamResponse(status=206 if partial else 200, headers=stated)
            response.content_length = len(data) - start
            await response.prepare(request)
            await response.write(data[start : start + (len(data) // breaks_at - 1000)])
            assert request.transport is not None
            request.transport.close()
            return response
        return await odd._blob(request, data)

    odd.ranges, odd.answers[victim] = ranges, breaks
    await download(odd, tmp_path / "image")
    for digest, expected in image.blobs.items():
        assert (tmp_path / "image/blobs/sha256" / hex_of(digest)).read_bytes() == expected
    assert broken == breaks_at


async def test_other_bytes_fewer_and_more_are_corrupt(odd: Odd, tmp_path: Path) -> None:
    image = published(odd)
    victim = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    data = image.blobs[victim]
    for number, wrong in enumerate((bytes(len(data)), data[:-1], data + b"x")):
        odd.blobs[victim] = wrong
        with pytest.raises(Corrupt):
            await download(odd, tmp_path / f"image-{number}")


async def test_what_never_comes_is_unavailable_and_what_is_gone_not_found(odd: Odd, tmp_path: Path) -> None:
    image = published(odd)
    victim = Digest(max(image.blobs))

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, headers={"Retry-After": "0"})

    odd.answers[victim] = broken
    with pytest.raises(Unavailable):
        await download(odd, tmp_path / "image")
    del odd.answers[victim], odd.blobs[victim]
    with pytest.raises(NotFound):
        await download(odd, tmp_path / "other")
