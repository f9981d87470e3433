"""Packages: references, manifests, configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, UsageError
from p2pdist.model.manifest import (
    CONFIG_TYPE,
    LAYERS_MAX,
    MANIFEST_BYTES_MAX,
    PIECES_DIGEST,
    PIECES_SIZE,
    PIECES_TYPE,
    SQUASHFS_TYPE,
    Config,
    Descriptor,
    Manifest,
    Reference,
    blob_reference,
    decode_config,
    decode_manifest,
    encode_config,
    encode_manifest,
    parse_reference,
)
from p2pdist.model.pieces import PIECE_SIZE_MIN, PieceLayout, encoded_size

DIGEST = digest_of(b"x")


def layer(number: int, size: int) -> tuple[Descriptor, Descriptor]:
    """A content layer and its piece list."""
    pieces = Descriptor(PIECES_TYPE, digest_of(b"pieces %d" % number), encoded_size(PieceLayout(size, PIECE_SIZE_MIN)))
    annotations = {PIECES_DIGEST: pieces.digest, PIECES_SIZE: str(PIECE_SIZE_MIN)}
    return Descriptor(SQUASHFS_TYPE, digest_of(b"layer %d" % number), size, annotations), pieces


def manifest(*sizes: int) -> Manifest:
    pairs = [layer(number, size) for number, size in enumerate(sizes)]
    return Manifest(
        Descriptor(CONFIG_TYPE, DIGEST, 2), tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    )


@given(st.lists(st.integers(0, 1 << 40), max_size=6))
def test_a_manifest_comes_back_as_it_was(sizes: list[int]) -> None:
    """Also in its bytes: equal packages have equal digests."""
    found = manifest(*[size % (1 << 30) for size in sizes])
    data = encode_manifest(found)
    assert decode_manifest(data) == found
    assert encode_manifest(decode_manifest(data)) == data


def test_layers_name_their_piece_lists() -> None:
    found = manifest(100, 3 * PIECE_SIZE_MIN + 1)
    top = decode_manifest(encode_manifest(found)).layers[1]
    assert top.pieces_digest == found.piece_lists[1].digest
    assert top.layout == PieceLayout(3 * PIECE_SIZE_MIN + 1, PIECE_SIZE_MIN)
    assert found.documents() == (found.config, *found.piece_lists)


def test_a_manifest_is_oci() -> None:
    """The fields that other tools look at, and no empty annotations."""
    document = json.loads(encode_manifest(manifest(5)))
    assert document["schemaVersion"] == 2
    assert document["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert document["config"] == {"mediaType": CONFIG_TYPE, "digest": DIGEST, "size": 2}
    assert [item["mediaType"] for item in document["layers"]] == [SQUASHFS_TYPE, PIECES_TYPE]


def change(edit: Callable[[Any], object]) -> bytes:
    document = json.loads(encode_manifest(manifest(5)))
    edit(document)
    return json.dumps(document).encode()


BAD_MANIFESTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"schemaVersion": "\xff"}',
    "no object": b"[]",
    "nested without end": b"[" * 100_000,
    "nested without end in a field unknown": b'{"more": ' + b"[" * 100_000,
    "no config": change(lambda document: document.pop("config")),
    "other schema": change(lambda document: document.update(schemaVersion=1)),
    "other type": change(lambda document: document.update(mediaType="application/vnd.oci.image.index.v1+json")),
    "digest with a path": change(lambda document: document["layers"][0].update(digest="sha256:../../etc/passwd")),
    "negative size": change(lambda document: document["layers"][0].update(size=-1)),
    "size beyond all": change(lambda document: document["layers"][0].update(size=1 << 62)),
    "fractional size": change(lambda document: document["layers"][0].update(size=1.5)),
    "huge config": change(lambda document: document["config"].update(size=MANIFEST_BYTES_MAX + 1)),
    "no annotations": change(lambda document: document["layers"][0].pop("annotations")),
    "no piece list": change(lambda document: document["layers"].pop()),
    "piece list of another size": change(lambda document: document["layers"][1].update(size=61)),
    "piece list of the wrong type": change(lambda document: document["layers"][1].update(mediaType="x")),
    "impossible piece size": change(
        lambda document: document["layers"][0]["annotations"].update({PIECES_SIZE: "65537"})
    ),
    "piece size zero": change(lambda document: document["layers"][0]["annotations"].update({PIECES_SIZE: "0"})),
    "piece size without end": change(
        lambda document: document["layers"][0]["annotations"].update({PIECES_SIZE: "9" * 5000})
    ),
    "piece size in words": change(lambda document: document["layers"][0]["annotations"].update({PIECES_SIZE: "many"})),
    "piece size in other digits": change(
        lambda document: document["layers"][0]["annotations"].update({PIECES_SIZE: "\u00b2"})
    ),
    "too many layers": encode_manifest(manifest(*[1] * (LAYERS_MAX + 1))),
    "too long": encode_manifest(manifest(1)) + b" " * MANIFEST_BYTES_MAX,
}


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_malformed_manifests_are_corrupt(name: str) -> None:
    with pytest.raises(Corrupt) as caught:
        decode_manifest(BAD_MANIFESTS[name])
    assert "push it again" in caught.value.remedy
    assert len(caught.value.what) < 300


@pytest.mark.parametrize(
    "document",
    [
        {"config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": DIGEST, "size": 2}},
        {
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": DIGEST, "size": 2},
        },
        {"manifests": [{"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": DIGEST, "size": 2}]},
    ],
)
def test_a_container_image_is_called_one(document: dict[str, object]) -> None:
    """skopeo copies images to where packages are: packing anew would not help."""
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": DIGEST, "size": 3}
    data = json.dumps({"schemaVersion": 2, "layers": [layer], **document}).encode()
    with pytest.raises(Corrupt, match="is a container image") as caught:
        decode_manifest(data)
    assert "p2pdist import" in caught.value.remedy


def test_the_most_layers_are_allowed() -> None:
    assert len(decode_manifest(encode_manifest(manifest(*[1] * LAYERS_MAX))).layers) == LAYERS_MAX


@given(st.binary(max_size=300))
def test_noise_is_corrupt_not_a_crash(data: bytes) -> None:
    for decode in (decode_manifest, decode_config):
        try:
            decode(data)
        except Corrupt:
            continue


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VARIABLES = st.tuples(TEXTS, TEXTS).map("=".join).filter(lambda entry: "\0" not in entry)


@given(st.lists(TEXTS), st.lists(VARIABLES), TEXTS)
def test_a_config_comes_back_as_it_was(entrypoint: list[str], env: list[str], working_dir: str) -> None:
    config = Config(tuple(entrypoint), tuple(env), working_dir)
    assert decode_config(encode_config(config)) == config


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"config": 1}',
        b'{"config": {"Entrypoint": "python"}}',
        b'{"config": {"Entrypoint": [1]}}',
        b'{"config": {"Env": ["NOVALUE"]}}',
        b'{"config": {"Env": ["A=b\\u0000c"]}}',
        b'{"config": {"Env": ["\xff=1"]}}',
        b'{"more": ' + b"[" * 100_000,
    ],
)
def test_malformed_configs_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_config(data)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("trainer", Reference("trainer", "latest")),
        ("trainer:v3", Reference("trainer", "v3")),
        ("team/sub.group/my-trainer_x:V3.1_rc-2", Reference("team/sub.group/my-trainer_x", "V3.1_rc-2")),
        (f"trainer@{DIGEST}", Reference("trainer", "", DIGEST)),
    ],
)
def test_references_parse(text: str, reference: Reference) -> None:
    """They print as they were written, but for the tag that may be left out."""
    assert parse_reference(text) == reference
    assert str(reference) in {text, f"{text}:latest"}
    assert parse_reference(str(reference)) == reference


def test_the_reference_of_a_blob_parses() -> None:
    reference = blob_reference(DIGEST)
    assert parse_reference(str(reference)) == reference == Reference("blob", f"sha256-{DIGEST[7:]}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":v1",
        "@",
        "a:",
        "a@",
        f"@{DIGEST}",
        "a@sha256:00",
        "A:v1",
        "a b:v1",
        "../a:v1",
        "/a:v1",
        "a/:v1",
        "a//b:v1",
        "a/../b:v1",
        ".a:v1",
        "a.:v1",
        "a..b:v1",
        "a:v/1",
        "a:-v",
        "a:.v",
        "a:" + "v" * 129,
        "a" * 256 + ":v1",
        "a:v1\n",
        "a\n:v1",
        "é:v1",
        f"a:v1@{DIGEST}",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)


def test_a_descriptor_that_states_no_pieces_says_so() -> None:
    plain = Descriptor(SQUASHFS_TYPE, Digest(DIGEST), 1)
    with pytest.raises(Corrupt, match="names no piece list"):
        _ = plain.pieces_digest
    with pytest.raises(Corrupt, match="states piece size"):
        _ = plain.layout
