"""Names of images and upstreams, and manifests of images as registries serve them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_rig import make_image, make_index

from p2pdist.model.access import Patterns
from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError, Refused, UsageError
from p2pdist.model.image import canonical_reference, package_reference, parse_image
from p2pdist.model.image_manifest import (
    DOCKER_INDEX_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_TYPE,
    ImageIndex,
    ImageManifest,
    clean_media_type,
    decode_image,
)
from p2pdist.model.manifest import MANIFEST_TYPE
from p2pdist.model.platform import parse_platform
from p2pdist.model.upstream import parse_upstream, unique, upstream_of

DIGEST = digest_of(b"x")


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("docker://debian", "docker://docker.io/library/debian:latest"),
        ("docker://team/app:v1", "docker://docker.io/team/app:v1"),
        ("docker://docker.io/debian:12", "docker://docker.io/library/debian:12"),
        ("docker://index.docker.io/team/app", "docker://docker.io/team/app:latest"),
        ("docker://localhost/app", "docker://localhost/app:latest"),
        ("docker://localhost:5000/a/b/c:v1", "docker://localhost:5000/a/b/c:v1"),
        ("docker://Quay.IO/a/b", "docker://quay.io/a/b:latest"),
        ("docker://[::1]:5000/a:v1", "docker://[::1]:5000/a:v1"),
        (f"docker://quay.io/a/b@{DIGEST}", f"docker://quay.io/a/b@{DIGEST}"),
        (f"docker://quay.io/a/b:v1@{DIGEST}", f"docker://quay.io/a/b:v1@{DIGEST}"),
    ],
)
def test_an_image_has_one_full_name(text: str, full: str) -> None:
    assert canonical_reference(text) == canonical_reference(full) == full
    image = parse_image(text)
    assert image.target == (image.digest or image.tag)
    assert package_reference(text).name == str(image.name)


@pytest.mark.parametrize(
    "text",
    [
        "docker://",
        "docker:///a",
        "docker://quay.io/",
        "docker://quay.io/../a",
        "docker://quay.io/a/../b",
        "docker://quay.io/A",
        "docker://quay.io/a:",
        "docker://quay.io/a:..",
        "docker://quay.io/a@",
        "docker://quay.io/a@sha256:0",
        f"docker://quay.io/a@{DIGEST}x",
        "docker://quay.io/a b",
        "docker://quay.io/a?b",
        "docker://quay.io/a#b",
        "docker://user@quay.io/a",
        "docker://quay.io:port/a",
        "docker://qu\nay.io/a",
        "docker://" + "a" * 2000,
        "docker://quay.io/" + "a" * 300,
    ],
)
def test_what_is_no_image_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_image(text)


@given(st.text(max_size=80))
def test_whatever_is_written_is_an_image_or_refused(text: str) -> None:
    try:
        image = parse_image("docker://" + text)
    except UsageError:
        return
    assert parse_image(str(image)) == image


def test_rights_are_written_with_the_names_of_registries() -> None:
    patterns = Patterns.parse(["127.0.0.1:5000/team/*", "docker.io/library/debian", "quay.io/*"], "here")
    for name in ("127.0.0.1:5000/team/app", "127.0.0.1:5000/team/a/b", "docker.io/library/debian", "quay.io/a/b"):
        assert patterns.match(name)
    for name in ("127.0.0.1/team/app", "127.0.0.1:50000/team/app", "docker.io/library/debian2", "quay.io:1/a"):
        assert not patterns.match(name)
    for wrong in ("a:b/c", "a/b:5000", "a:123456/b", ":5000/b", "a:/b"):
        with pytest.raises(UsageError):
            Patterns.parse([wrong], "here")


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("docker.io", "docker.io", "https://registry-1.docker.io"),
        ("Docker.IO", "docker.io", "https://registry-1.docker.io"),
        ("quay.io", "quay.io", "https://quay.io"),
        ("127.0.0.1:5000", "127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("localhost:5000", "localhost:5000", "http://localhost:5000"),
        ("[::1]:5000", "[::1]:5000", "http://[::1]:5000"),
        ("localhost.example:5000", "localhost.example:5000", "https://localhost.example:5000"),
        ("127.0.0.1.example", "127.0.0.1.example", "https://127.0.0.1.example"),
        ("a.b = http://10.0.0.1:80/", "a.b", "http://10.0.0.1:80"),
    ],
)
def test_plain_http_is_spoken_to_this_machine_and_where_the_url_says_so(text: str, name: str, url: str) -> None:
    found = parse_upstream(text)
    assert (found.name, found.url) == (name, url)


@pytest.mark.parametrize(
    "text",
    ["", "=https://a.b", "a/b", "a.b=a.b", "a.b=https://u:secret@a.b", "a.b=https://a.b/x", "a.b=https://a.b:0", "a b"],
)
def test_what_is_no_upstream_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_upstream(text)
    assert "secret" not in str(caught.value)


def test_an_upstream_is_named_once() -> None:
    with pytest.raises(UsageError, match="twice"):
        unique((upstream_of("a.b"), upstream_of("A.B", "https://other.example")))


# -- manifests


def test_manifests_and_indexes_of_both_kinds() -> None:
    for docker, kinds in ((False, (MANIFEST_TYPE, INDEX_TYPE)), (True, (DOCKER_MANIFEST_TYPE, DOCKER_INDEX_TYPE))):
        image = make_image({"a": b"1"}, {"b": b"2"}, docker=docker)
        for media_type in ("", kinds[0], "application/octet-stream"):
            found = decode_image(image.data, media_type)
            assert isinstance(found, ImageManifest) and found.media_type == kinds[0]
            assert {blob.digest: blob.size for blob in found.blobs} == {
                key: len(data) for key, data in image.blobs.items()
            }
        index = decode_image(make_index({"amd64": image}, docker=docker).data)
        assert isinstance(index, ImageIndex) and index.media_type == kinds[1]


def entry(number: int, platform: dict[str, str] | None, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"mediaType": MANIFEST_TYPE, "digest": digest_of(bytes([number])), "size": 1, **more}
    return found if platform is None else {**found, "platform": platform}


def index_of(*entries: dict[str, Any]) -> ImageIndex:
    found = decode_image(json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
    assert isinstance(found, ImageIndex)
    return found


def test_the_image_of_a_platform_is_that_of_the_highest_level_it_runs() -> None:
    attested = {"vnd.docker.reference.type": "attestation-manifest"}
    index = index_of(
        entry(0, {"os": "linux", "architecture": "amd64"}, annotations=attested),
        entry(1, {"os": "unknown", "architecture": "unknown"}),
        entry(2, {"os": "windows", "architecture": "amd64"}),
        entry(3, {"os": "linux", "architecture": "amd64"}),
        entry(4, {"os": "linux", "architecture": "amd64", "variant": "v3"}),
        entry(5, {"os": "linux", "architecture": "arm64", "variant": "v8"}),
        entry(6, {"os": "linux", "architecture": "arm", "variant": "v6"}),
        entry(7, {"os": "linux", "architecture": "arm", "variant": "v7"}),
    )
    for text, number in {
        "linux/amd64": 3,
        "linux/amd64/v2": 3,
        "linux/amd64/v3": 4,
        "linux/amd64/v4": 4,
        "linux/arm64": 5,
        "linux/aarch64": 5,
        "linux/arm/v7": 7,
        "linux/arm/v6": 6,
    }.items():
        assert index.choose(parse_platform(text)[0]).digest == digest_of(bytes([number])), text
    for text in ("linux/s390x", "windows/arm64", "linux/arm/v5"):
        with pytest.raises(NotFound):
            index.choose(parse_platform(text)[0])
    assert index.choose(parse_platform("linux/arm/v5")[0], exact=False).digest in (
        digest_of(b"\x06"),
        digest_of(b"\x07"),
    )


def test_blobs_of_other_kinds_are_kept_apart() -> None:
    image = json.loads(make_image({"a": b"1"}).data)
    foreign = {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "digest": DIGEST, "size": 5}
    image["layers"] += [foreign, {"mediaType": "x/y", "digest": "sha512:" + "0" * 128, "size": 5}]
    found = decode_image(json.dumps(image).encode())
    assert isinstance(found, ImageManifest)
    assert [blob.digest for blob in found.foreign] == [DIGEST] and found.unnamed == ("sha512:" + "0" * 128,)
    assert DIGEST not in {blob.digest for blob in found.blobs}


def test_one_blob_has_one_size() -> None:
    image = json.loads(make_image({"a": b"1"}).data)
    for layer in (dict(image["layers"][0]), {**image["layers"][0], "mediaType": "a/b.nondistributable"}):
        layer["size"] += 1
        with pytest.raises(Corrupt, match="two sizes"):
            decode_image(json.dumps({**image, "layers": [*image["layers"], layer]}).encode())


FIELDS = st.sampled_from(["schemaVersion", "config", "layers", "manifests", "digest", "size", "platform"])
DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(), lambda part: st.lists(part) | st.dictionaries(FIELDS, part)
)


@given(st.binary(max_size=300) | DOCUMENTS.map(lambda plain: json.dumps(plain).encode()))
def test_whatever_a_registry_sends_is_a_manifest_or_refused(data: bytes) -> None:
    try:
        decode_image(data, MANIFEST_TYPE)
    except P2PDistError as error:
        assert isinstance(error, Corrupt | Refused)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("application/json; charset=utf-8", "application/json"),
        (INDEX_TYPE, INDEX_TYPE),
        ("", ""),
        ("text", ""),
        ("a/b\r\nX: y", ""),
        ("a/" + "b" * 300, ""),
        ("a/b c", ""),
    ],
)
def test_media_types_are_safe_to_pass_on(text: str, kind: str) -> None:
    assert clean_media_type(text) == kind
