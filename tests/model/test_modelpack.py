"""What an artifact may say of a model: kinds of layers, paths, limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2pdist.model.digest import EMPTY_DIGEST, digest_of
from p2pdist.model.errors import Corrupt, UsageError
from p2pdist.model.manifest import MODEL_LAYERS_MAX, PIECES_TYPE, Descriptor, decode_manifest, encode_manifest
from p2pdist.model.modelpack import (
    ARTIFACT_TYPE,
    CONFIG_TYPE,
    FILE_METADATA,
    FILE_PATH,
    TITLE,
    blob_name,
    decode_model,
    file_annotations,
    layer_type,
    model_entries,
    model_layers,
)
from p2pdist.model.tree import Directory, File

RAW = "application/vnd.cncf.model.weight.v1.raw"


def layer(path: str | None, data: bytes = b"data", kind: str = RAW, **annotations: str) -> Descriptor:
    named = {} if path is None else {FILE_PATH: path}
    return Descriptor(kind, digest_of(data), len(data), {**named, **annotations})


def document(*layers: Descriptor, **more: Any) -> bytes:
    listed = [
        {"mediaType": item.media_type, "digest": item.digest, "size": item.size, "annotations": dict(item.annotations)}
        for item in layers
    ]
    config = {"mediaType": CONFIG_TYPE, "digest": digest_of(b"{}"), "size": 2}
    return json.dumps({"schemaVersion": 2, "config": config, "layers": listed, **more}).encode()


def test_a_model_is_told_by_its_artifact_type_or_its_config() -> None:
    named = document(layer("a"), artifactType=ARTIFACT_TYPE)
    assert decode_model(named) == decode_model(document(layer("a")))
    other = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(b"{}"), "size": 2}
    assert decode_model(document(layer("a"), config=other)) is None
    assert decode_model(b"no manifest") is None


def test_piece_lists_are_no_files_of_a_model() -> None:
    model = decode_model(document(layer("a"), layer(None, b"list", PIECES_TYPE)))
    assert model is not None
    assert [item.path for item in model_layers(model.layers)] == [b"a"]


@pytest.mark.parametrize(
    ("path", "size", "kind"),
    [
        ("model-00001-of-00002.safetensors", 1, "weight"),
        ("tokenizer.json", 1, "weight.config"),
        ("README.md", 1, "doc"),
        ("LICENSE", 1, "doc"),
        ("modeling.py", 1, "code"),
        ("data/train.parquet", 1, "dataset"),
        ("unknown", 1, "weight.config"),
        ("unknown", 8 << 20, "weight"),
    ],
)
def test_a_name_says_the_kind_of_its_layer(path: str, size: int, kind: str) -> None:
    assert layer_type(path, size) == f"application/vnd.cncf.model.{kind}.v1.raw"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a\nb", "a\x1b[2J", "x" * 256, "a/" * 2100 + "b", ""]
)
def test_paths_that_cannot_be_are_refused_by_name(path: str) -> None:
    with pytest.raises(Corrupt) as failure:
        model_layers([layer(path)])
    assert digest_of(b"data") in failure.value.what
    assert failure.value.what.isprintable()


def test_paths_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(Corrupt, match="two layers of the model are called a"):
        model_entries([layer("a"), layer("a", b"other")])
    with pytest.raises(Corrupt, match="a is a file of the model, and a directory"):
        model_entries([layer("a"), layer("a/b")])


def test_other_layers_and_tars() -> None:
    with pytest.raises(Corrupt, match="is of type application/x"):
        model_layers([layer("a", kind="application/x")])
    tar = layer(None, kind=RAW.replace("raw", "tar+gzip"))
    assert [(item.form, item.path) for item in model_layers([tar])] == [("tar+gzip", b"")]
    with pytest.raises(UsageError, match="is a tar"):
        model_entries([tar])


def test_limits() -> None:
    many = [layer(str(number)) for number in range(MODEL_LAYERS_MAX + 1)]
    with pytest.raises(Corrupt, match="over the limit"):
        decode_model(document(*many))
    with pytest.raises(Corrupt, match="metadata of"):
        model_layers([layer("a", **{FILE_METADATA: "x" * 100_000})])
    with pytest.raises(Corrupt, match="impossible descriptor"):
        decode_model(document(Descriptor(RAW, digest_of(b""), -1, {})))


def test_files_and_directories_in_walking_order() -> None:
    entries = model_entries([layer("b/c", b"1"), layer("a", b"22"), layer(None, b"", **{TITLE: "b/a"})])
    assert [(type(entry), entry.path) for entry in entries] == [
        (File, b"a"),
        (Directory, b"b"),
        (File, b"b/a"),
        (File, b"b/c"),
    ]
    first, empty = entries[0], entries[2]
    assert isinstance(first, File) and isinstance(empty, File)
    assert "sha256:" + blob_name(first.content).decode() == digest_of(b"22")
    assert empty.size == 0 and blob_name(empty.content).decode() == EMPTY_DIGEST[7:]


@pytest.mark.parametrize(("mode", "shown"), [(0o600, 0o644), (0o100755, 0o755), (0o4777, 0o755)])
def test_everybody_reads_and_only_root_writes(mode: int, shown: int) -> None:
    (item,) = model_layers([layer("a", **{FILE_METADATA: json.dumps({"mode": mode})})])
    assert item.mode == shown
    assert json.loads(file_annotations("a", 4, mode)[FILE_METADATA])["mode"] == mode & 0o777


def test_only_models_say_that_they_are_something_else() -> None:
    plain = document(layer(None, b"list", PIECES_TYPE))
    assert b"artifactType" not in encode_manifest(decode_manifest(plain))
    model = decode_manifest(document(layer(None, b"list", PIECES_TYPE), artifactType=ARTIFACT_TYPE))
    assert model.artifact_type == ARTIFACT_TYPE and decode_manifest(encode_manifest(model)) == model
