"""An S3 bucket as an origin, against moto's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from origin_rig import BUCKET, free_port, store_file

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, Refused, Unavailable
from p2pdist.model.manifest import parse_reference
from p2pdist.origin.drivers import open_origin
from p2pdist.origin.layout import LayoutOrigin

V1 = parse_reference("app:v1")


async def test_keys_lie_below_the_prefix(s3: Any, payload: Path) -> None:
    origin = open_origin(f"s3://{BUCKET}/team/a")
    assert isinstance(origin, LayoutOrigin)
    await store_file(origin, payload, "app:v1")
    keys = {item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert {"team/a/oci-layout", "team/a/index.json"} < keys
    assert all(key.startswith("team/a/") for key in keys)
    await origin.close()


async def test_a_bucket_without_prefix(s3: Any, payload: Path) -> None:
    origin = open_origin(f"s3://{BUCKET}")
    assert isinstance(origin, LayoutOrigin)
    _, manifest = await store_file(origin, payload, "app:v1")
    assert await origin.resolve(V1) == manifest
    await origin.close()


async def test_a_failed_upload_leaves_no_parts(s3: Any, tmp_path: Path) -> None:
    path = tmp_path / "altered"
    path.write_bytes(bytes(20 << 20))
    origin = open_origin(f"s3://{BUCKET}/x")
    with pytest.raises(Corrupt):
        await origin.write_blob(digest_of(b""), path)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=BUCKET)
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET)
    await origin.close()


async def test_a_missing_bucket_is_named(s3: Any) -> None:
    origin = open_origin("s3://nowhere/x")
    with pytest.raises(NotFound, match="s3://nowhere/x"):
        await origin.resolve(V1)
    with pytest.raises(NotFound, match="s3://nowhere/x"):
        await origin.write_document(b"data")
    await origin.close()


async def test_an_endpoint_that_is_down(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    origin = open_origin(f"s3://{BUCKET}/x")
    with pytest.raises(Unavailable) as caught:
        await origin.resolve(V1)
    assert f"s3://{BUCKET}/x" in str(caught.value)
    assert "secret-of-the-key" not in str(caught.value)
    await origin.close()


async def test_without_credentials_one_is_told_so(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata service of a cloud is the last place that is asked; here a closed port stands
    for it."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    origin = open_origin(f"s3://{BUCKET}/x")
    with pytest.raises((Refused, Unavailable)) as caught:
        await origin.resolve(V1)
    assert f"s3://{BUCKET}/x" in str(caught.value)
    await origin.close()
