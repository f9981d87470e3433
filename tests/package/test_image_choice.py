"""Which image of several is imported: by name, tag, digest and platform."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
from test_archive_import import content, image_layout, tar_of

from p2pdist.model.errors import NotFound, P2PDistError, UsageError
from p2pdist.package.archive.import_ import unpack_source

HERE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
FOREIGN = "s390x" if HERE != "s390x" else "amd64"
REF, IMAGE = "org.opencontainers.image.ref.name", "io.containerd.image.name"


def on(architecture: str, variant: str = "", **annotations: str) -> dict[str, Any]:
    said = {"platform": {"os": "linux", "architecture": architecture, **({"variant": variant} if variant else {})}}
    return {**(said if architecture else {}), **({"annotations": annotations} if annotations else {})}


def index(place: Path, entries: list[dict[str, Any]], *, nested: bool = True) -> Path:
    """An index of images that hold a file named by their position; `nested`: below an index that
    names it `latest`."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)
    described = []
    for number, entry in enumerate(entries):
        made = image_layout(place / f"image{number}", [tar_of((f"{entry.pop('same', number)}", "x"))], {})
        for blob in (made / "blobs/sha256").iterdir():
            blob.rename(blobs / blob.name)
        (own,) = json.loads((made / "index.json").read_text())["manifests"]
        manifest = json.loads((blobs / own["digest"][7:]).read_text())
        config = json.loads((blobs / manifest["config"]["digest"][7:]).read_text())
        config |= {key: value for key, value in entry.get("platform", {}).items() if value}
        manifest["config"] = blob_of(blobs, config)
        described.append({**blob_of(blobs, manifest), **entry})
    listed = {"schemaVersion": 2, "manifests": described}
    if nested:
        listed = {"schemaVersion": 2, "manifests": [{**blob_of(blobs, listed), "annotations": {REF: "latest"}}]}
    (place / "index.json").write_text(json.dumps(listed))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


def blob_of(blobs: Path, document: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": "application/x", "digest": f"sha256:{digest}", "size": len(data)}


def taken(source: Path, work: Path, **chosen: str) -> tuple[str, tuple[str, ...]]:
    work.mkdir()
    found = unpack_source(source, work, **chosen)  # type: ignore[arg-type]
    (name,) = content(found.root)
    return name, found.notes


AMD64 = [on("amd64", "v4"), on("amd64", "v2"), on("amd64"), on("amd64", "v3")]
ARM = [on("arm", "v5"), on("arm", "v7"), on("arm64", "v8"), on("arm", "v6")]


@pytest.mark.parametrize(
    ("entries", "wanted", "expected"),
    [
        ([on(FOREIGN), on(HERE)], "", 1),
        ([on(HERE), on(HERE, "v99")], "", 0),
        ([on(HERE, "v99"), on(HERE)], "", 1),
        ([on(HERE), on("unknown"), on(FOREIGN)], "", 0),
        (AMD64, "linux/amd64", 2),
        (AMD64, "linux/amd64/v3", 3),
        (AMD64, "linux/x86_64/v2", 1),
        ([on("amd64", "v2"), on("amd64", "v3")], "linux/amd64", 0),
        (ARM, "linux/arm/v7", 1),
        (ARM, "linux/arm", 1),
        (ARM, "linux/arm/v6", 3),
        (ARM, "linux/armhf", 1),
        (ARM, "linux/aarch64", 2),
        ([on(HERE, same="x"), on(HERE, same="x")], "", "x"),
    ],
)  # fmt: skip
def test_one_of_an_index(tmp_path: Path, entries: list[dict[str, Any]], wanted: str, expected: int | str) -> None:
    """The first that this machine runs; of a platform that is asked for the closest."""
    for entry in entries:
        if "same" in entry.get("annotations", {}):
            entry["same"] = entry.pop("annotations")["same"]
    source = index(tmp_path / "image", [dict(entry) for entry in entries])
    assert taken(source, tmp_path / "work", platform=wanted)[0] == str(expected)


@pytest.mark.parametrize(
    ("entries", "wanted", "failure"),
    [
        ([on(FOREIGN), on("ppc64le")], "", NotFound),
        (AMD64[:1], "linux/arm64", NotFound),
        ([on("amd64", "v2"), on("amd64", "v3")], "linux/amd64/v1", NotFound),
        ([on(HERE), on(HERE)], "", UsageError),
        ([on(""), on("")], "", UsageError),
        ([on(HERE), on("")], "", UsageError),
        (AMD64, "amd64", UsageError),
    ],
)
def test_none_of_an_index(
    tmp_path: Path, entries: list[dict[str, Any]], wanted: str, failure: type[P2PDistError]
) -> None:
    source = index(tmp_path / "image", [dict(entry) for entry in entries])
    with pytest.raises(failure):
        taken(source, tmp_path / "work", platform=wanted)


def test_an_image_for_another_machine_alone_is_taken_with_a_word(tmp_path: Path) -> None:
    attested = on("unknown", **{"vnd.docker.reference.type": "attestation-manifest"})
    source = index(tmp_path / "image", [on(FOREIGN), attested])
    name, notes = taken(source, tmp_path / "1")
    assert name == "0" and f"for linux/{FOREIGN}" in notes[0]
    assert not taken(index(tmp_path / "own", [on(HERE)]), tmp_path / "2")[1]
    taken(source, tmp_path / "3", platform=f"linux/{FOREIGN}")
    with pytest.raises(NotFound, match=FOREIGN):
        taken(source, tmp_path / "4", platform=f"linux/{HERE}")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("team/app:1", "0"),
        ("docker.io/team/app:1", "0"),
        ("index.docker.io/team/app:1", "0"),
        ("tools", "1"),
        ("tools:latest", "1"),
        ("library/tools", "1"),
        ("registry.example:5000/team/app", "2"),
        ("podman", "3"),
        ("only-a-tag", "4"),
        ("app:1", None),
        ("team/app", None),
        ("1", None),
    ],
)
def test_images_by_the_names_that_docker_gives_them(tmp_path: Path, wanted: str, expected: str | None) -> None:
    entries = [
        on(HERE, **{IMAGE: "docker.io/team/app:1"}),
        on(HERE, **{IMAGE: "docker.io/library/tools:latest"}),
        on(HERE, **{REF: "registry.example:5000/team/app:latest"}),
        on(HERE, **{REF: "localhost/podman:latest"}),
        on(HERE, **{REF: "only-a-tag"}),
    ]
    source = index(tmp_path / "image", entries, nested=False)
    if expected is None:
        with pytest.raises(NotFound, match="team/app:1, "):
            taken(source, tmp_path / "work", image=wanted)
    else:
        assert taken(source, tmp_path / "work", image=wanted)[0] == expected


def test_several_images_are_not_guessed_at(tmp_path: Path) -> None:
    """Also where their platforms differ; one image with two names is one."""
    two = [on(HERE, **{REF: "1"}), on(HERE, "v99" if HERE != "amd64" else "v1", **{REF: "2"})]
    source = index(tmp_path / "two", two, nested=False)
    with pytest.raises(UsageError, match="1, 2"):
        taken(source, tmp_path / "1")
    digest = json.loads((source / "index.json").read_text())["manifests"][1]["digest"]
    assert taken(source, tmp_path / "2", image=digest)[0] == "1"
    again = [{**on(HERE, **{REF: "1"}), "same": "x"}, {**on(HERE, **{REF: "latest"}), "same": "x"}]
    assert taken(index(tmp_path / "again", again, nested=False), tmp_path / "3")[0] == "x"
