"""S3 clients read packages and blobs through an agent, with real processes: boto3, while the swarm
brings what they read, and after it has."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import boto3
import programs
import pytest
from botocore import UNSIGNED
from botocore.client import Config
from botocore.exceptions import ClientError
from ports import free_port
from site_rig import Agent, Site
from waits import wait_until

KIB, MIB = 1 << 10, 1 << 20
RATE_BYTES_S = 1e6
"""Of the origin, until a range has come long before the rest, also on a busy machine."""
WEIGHTS = 24 * MIB
KEY, SECRET = "reader", "not-a-secret-of-anyone"
STRANGE = (
    "a b+c&d=e",
    "ü/😀",
    "per%2Fcent",
    "tab\there",
    "quo\"te'<>&",
    "dots/...",
    "~tilde",
    "#hash?query",
    "two\nlines",
)


def publish(site: Site, files: dict[str, bytes], reference: str) -> None:
    """Pack files as a tree, and push it."""
    directory, layout = site.directory / "source", ("--layout", str(site.directory / "layout"))
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    words = ("pack", str(directory), "-t", reference, "--format", "tree", *layout)
    for command in (words, ("push", reference, "--origin", f"file://{site.layout}", *layout)):
        code, _, errors = site.command(*command)
        assert code == 0, errors


def settings(site: Site, text: str) -> Path:
    path = site.directory / "s3.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def agent_of(site: Site, name: str, **options: str) -> Agent:
    """An agent that serves S3 clients."""
    return Agent(site, name, s3=f"127.0.0.1:{free_port()}", **options).start()


def client_of(agent: Agent, key: str = KEY, secret: str = SECRET, **config: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=f"http://{agent.options['s3']}",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="eu-central-7",
        config=Config(s3={"addressing_style": "path"}, proxies={}, **config),
    )


def read(client: Any, bucket: str, key: str, start: int = 0, end: int = 0) -> bytes:
    more = {"Range": f"bytes={start}-{end - 1}"} if end else {}
    return bytes(client.get_object(Bucket=bucket, Key=key, **more)["Body"].read())


def code_of(call: Any, **words: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as failure:
        call(**words)
    response = failure.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@pytest.mark.slow
def test_a_range_comes_before_the_rest_of_a_broadcast(site: Site) -> None:
    """The last megabyte of a package that three agents fetch at once: here when a part of it all
    has come to that host. The rest follows, and the origin is read about once."""
    weights = random.Random(1).randbytes(WEIGHTS)
    publish(site, {"model/weights.bin": weights, "model/config.json": b"{}"}, "team/model:v1")
    site.origin.rate_bytes_s = RATE_BYTES_S
    reader, *others = agent_of(site, "h0", bucket="models=team/model:v1"), *site_agents(site, 2)
    client = client_of(reader)
    (config, listed) = client.list_objects_v2(Bucket="models")["Contents"]
    assert (config["Key"], config["Size"]) == ("model/config.json", 2)
    assert (listed["Key"], listed["Size"]) == ("model/weights.bin", WEIGHTS)
    pulls = [agent.start_pull(package="team/model:v1") for agent in others]
    wait_until(lambda: sum(site.origin.sent.values()) > MIB)
    assert read(client, "models", "model/weights.bin", WEIGHTS - MIB, WEIGHTS) == weights[-MIB:]
    assert reader.received() < 0.7 * WEIGHTS
    site.origin.rate_bytes_s = 0.0
    assert read(client, "models", "model/weights.bin") == weights
    head = client.head_object(Bucket="models", Key="model/weights.bin")
    assert (head["ContentLength"], head["ETag"]) == (WEIGHTS, listed["ETag"])
    for pull in pulls:
        assert pull.result().state == "done"
    wait_until(lambda: reader.metric('p2pdist_agent_s3_bytes_total{source="swarm"}') >= WEIGHTS + MIB)
    reader.pull(package="team/model:v1")
    assert read(client, "models", "model/weights.bin", 5, MIB) == weights[5:MIB]
    assert reader.metric('p2pdist_agent_s3_bytes_total{source="store"}') == MIB - 5
    assert sum(site.origin.sent.values()) < 2 * WEIGHTS  # of three hosts; leases move on a busy machine


def site_agents(site: Site, count: int) -> list[Agent]:
    return [Agent(site, f"o{number}").start() for number in range(count)]


@pytest.mark.slow
def test_a_range_of_a_blob_comes_before_the_rest(site: Site) -> None:
    digest = site.publish(WEIGHTS)
    data = (site.directory / "content").read_bytes()
    missing = f"sha256:{hashlib.sha256(b'nowhere').hexdigest()}"
    file = settings(
        site,
        f'[[bucket]]\nname = "blobs"\nblobs = {{"a/weights" = "{digest}", "b" = "{digest}", "no" = "{missing}"}}\n',
    )
    reader = agent_of(site, "h0", s3_settings=str(file))
    site.origin.rate_bytes_s = RATE_BYTES_S
    client = client_of(reader)
    listed = client.list_objects_v2(Bucket="blobs")["Contents"]
    assert [(entry["Key"], entry["ETag"]) for entry in listed] == [("a/weights", f'"{digest}"'), ("b", f'"{digest}"')]
    assert client.head_object(Bucket="blobs", Key="b")["ContentLength"] == WEIGHTS
    assert not os.listdir(reader.store / "partial") and site.origin_bytes(digest) == 0, "HEAD brings nothing"
    assert read(client, "blobs", "a/weights", WEIGHTS - 7 * KIB, WEIGHTS - KIB) == data[-7 * KIB : -KIB]
    assert reader.received() < 0.7 * WEIGHTS
    site.origin.rate_bytes_s = 0.0
    assert read(client, "blobs", "b") == data
    assert site.origin_bytes(digest) <= 1.1 * WEIGHTS
    assert code_of(client.get_object, Bucket="blobs", Key="no") == (404, "NoSuchKey")


@pytest.mark.slow
def test_a_client_goes_on_after_its_agent_was_killed(site: Site) -> None:
    """boto3 asks again by itself, and what had come is not fetched again."""
    weights = random.Random(2).randbytes(WEIGHTS)
    publish(site, {"weights": weights}, "model:v1")
    site.origin.rate_bytes_s = RATE_BYTES_S
    reader = agent_of(site, "h0", bucket="models=model:v1")
    client = client_of(reader, retries={"max_attempts": 10, "mode": "standard"})
    assert read(client, "models", "weights", 0, MIB) == weights[:MIB]
    body = client.get_object(Bucket="models", Key="weights")["Body"]
    assert body.read(MIB) == weights[:MIB]
    reader.kill()
    with pytest.raises(Exception):  # noqa: B017  # whichever of its own errors says that the body is truncated
        body.read()
    sent = sum(site.origin.sent.values())
    site.origin.rate_bytes_s = 0.0
    reader.start()
    assert read(client, "models", "weights", MIB, 3 * MIB) == weights[MIB : 3 * MIB]
    assert read(client, "models", "weights") == weights
    assert sum(site.origin.sent.values()) - sent < WEIGHTS


@pytest.mark.slow
def test_listings_keys_and_conditions(site: Site) -> None:
    """Ten thousand keys by pages; keys that need care; ranges, conditions and failures as S3
    answers them."""
    many = {f"many/{number:05}": b"%d" % number for number in range(10_000)}
    odd = {name: name.encode() for name in STRANGE}
    publish(site, {**many, **odd, "empty": b"", "text": b"0123456789"}, "app:v1")
    os.symlink("text", site.directory / "source" / "link")
    os.symlink("/etc/passwd", site.directory / "source" / "outside")
    publish(site, {}, "app:v1")
    agent = agent_of(site, "h0", bucket="apps=app:v1")
    client = client_of(agent)
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["apps"]
    pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="apps", Prefix="many/"))
    assert len(pages) == 10 and [entry["Key"] for page in pages for entry in page["Contents"]] == sorted(many)
    top = client.list_objects_v2(Bucket="apps", Delimiter="/")
    assert [prefix["Prefix"] for prefix in top["CommonPrefixes"]] == sorted(["dots/", "many/", "ü/"])
    names = {entry["Key"] for entry in top["Contents"]}
    assert names == {name for name in STRANGE if "/" not in name} | {"empty", "text", "link"}
    old = list(
        client.get_paginator("list_objects").paginate(Bucket="apps", Delimiter="/", PaginationConfig={"PageSize": 3})
    )
    assert {entry["Key"] for page in old for entry in page.get("Contents", ())} == names
    for name in STRANGE:
        assert read(client, "apps", name) == name.encode()
    assert read(client, "apps", "link") == b"0123456789" and read(client, "apps", "empty") == b""
    check_conditions(client)
    agent.pull(package="app:v1")
    tag = client.head_object(Bucket="apps", Key="text")["ETag"].strip('"')
    (lost,) = [path for path in agent.store.rglob(f"*{tag[-40:]}") if path.is_file()]
    lost.unlink()
    assert read(client, "apps", "text") == b"0123456789"
    wait_until(lost.exists, "a pull that brings the file again")
    assert client.get_bucket_location(Bucket="apps")["LocationConstraint"] is None
    assert agent.metric('p2pdist_agent_s3_requests_total{kind="GetObject",result="unknown"}') >= 1


def check_conditions(client: Any) -> None:
    """Of the object "text"."""
    where = {"Bucket": "apps", "Key": "text"}
    tag = client.head_object(**where)["ETag"]
    assert client.get_object(**where, Range="bytes=-3")["Body"].read() == b"789"
    assert client.get_object(**where, IfMatch=tag, Range="bytes=2-")["ContentRange"] == "bytes 2-9/10"
    assert code_of(client.get_object, **where, IfMatch='"other"') == (412, "PreconditionFailed")
    assert code_of(client.get_object, **where, IfNoneMatch=tag)[0] == 304
    since = client.head_object(**where)["LastModified"]
    assert code_of(client.get_object, **where, IfModifiedSince=since)[0] == 304
    assert code_of(client.get_object, **where, Range="bytes=10-") == (416, "InvalidRange")
    assert code_of(client.get_object, Bucket="apps", Key="none") == (404, "NoSuchKey")
    assert code_of(client.get_object, Bucket="apps", Key="many") == (404, "NoSuchKey")
    assert code_of(client.get_object, Bucket="nowhere", Key="text") == (404, "NoSuchBucket")
    assert code_of(client.head_object, Bucket="apps", Key="none")[0] == 404
    assert code_of(client.head_bucket, Bucket="nowhere")[0] == 404
    assert code_of(client.put_object, **where, Body=b"x" * MIB) == (405, "MethodNotAllowed")
    assert code_of(client.delete_object, **where) == (405, "MethodNotAllowed")
    assert code_of(client.create_multipart_upload, **where) == (405, "MethodNotAllowed")
    assert code_of(client.get_object_acl, **where) == (501, "NotImplemented")


@pytest.mark.slow
def test_with_access_keys_requests_are_signed_with_one_of_them(site: Site) -> None:
    publish(site, {"a b/ü": b"data"}, "app:v1")
    keys = f'[[key]]\nid = "{KEY}"\nsecret = "{SECRET}"\nbuckets = ["apps"]\n'
    file = settings(
        site, "".join(f'[[bucket]]\nname = "{name}"\npackage = "app:v1"\n' for name in ("apps", "rest")) + keys
    )
    agent = agent_of(site, "h0", s3_settings=str(file))
    client = client_of(agent)
    assert read(client, "apps", "a b/ü") == b"data"
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket="apps", Prefix="a b")["Contents"]] == ["a b/ü"]
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["apps"]
    assert code_of(client.get_object, Bucket="rest", Key="a b/ü") == (404, "NoSuchBucket")
    where = {"Bucket": "apps", "Key": "a b/ü"}
    assert code_of(client_of(agent, secret="another-secret-of-16").get_object, **where) == (
        403,
        "SignatureDoesNotMatch",
    )
    assert code_of(client_of(agent, key="stranger").get_object, **where) == (403, "InvalidAccessKeyId")
    assert code_of(client_of(agent, signature_version=UNSIGNED).get_object, **where) == (403, "AccessDenied")
    assert SECRET not in agent.log.read_text()
    file.chmod(0o644)
    refused = programs.run("agent", "--s3", "1", "--s3-settings", file)
    assert refused.returncode == 2 and "chmod 600" in refused.stderr and SECRET not in refused.stderr


@pytest.mark.slow
def test_a_package_of_images_is_refused_with_what_to_do(site: Site) -> None:
    """Its files are not served one by one, and a client does not ask in vain again and again."""
    source, layout = site.directory / "source", ("--layout", str(site.directory / "layout"))
    source.mkdir()
    (source / "text").write_bytes(b"0123456789")
    for command in (
        ("pack", str(source), "-t", "app:v1", "--format", "squashfs", *layout),
        ("push", "app:v1", "--origin", f"file://{site.layout}", *layout),
    ):
        code, _, errors = site.command(*command)
        assert code == 0, errors
    client = client_of(agent_of(site, "h0", bucket="apps=app:v1"))
    with pytest.raises(ClientError) as failure:
        client.list_objects_v2(Bucket="apps")
    response = failure.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (501, "NotImplemented")
    assert "--format tree" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["RetryAttempts"] == 0
