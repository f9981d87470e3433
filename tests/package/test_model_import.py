"""Models of other tools that become packages: tars in all compressions, files as they are, and what
a hostile one must not write."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import zstandard

from p2pdist.model.digest import digest_of
from p2pdist.model.errors import Corrupt
from p2pdist.model.modelpack import ARTIFACT_TYPE, CONFIG_TYPE, FILE_PATH
from p2pdist.package.archive.import_ import unpack_source

BASE = "application/vnd.cncf.model."


def tar_of(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def layout_of(place: Path, *layers: tuple[str, bytes, str]) -> Path:
    """An OCI image layout with one model; layers are media type, bytes and path ("" for none)."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        (blobs / digest_of(data)[7:]).write_bytes(data)
        return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}

    listed = [
        put(data, BASE + kind) | ({"annotations": {FILE_PATH: path}} if path else {}) for kind, data, path in layers
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": ARTIFACT_TYPE,
        "config": put(b"{}", CONFIG_TYPE),
        "layers": listed,
    }
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), manifest["mediaType"])]}  # type: ignore[arg-type]
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return place


@pytest.mark.parametrize(
    ("form", "compress"),
    [
        ("tar", bytes),
        ("tar+gzip", lambda data: gzip.compress(data, mtime=0)),
        ("tar+zstd", lambda data: zstandard.compress(data)),
    ],
)
def test_tars_and_files_are_unpacked(tmp_path: Path, form: str, compress: Callable[[bytes], bytes]) -> None:
    source = layout_of(
        tmp_path / "layout",
        (f"weight.v1.{form}", compress(tar_of({"model.safetensors": b"weights", ".wh.name": b"no whiteout"})), ""),
        ("weight.config.v1.raw", b"{}", "deep/config.json"),
        ("doc.v1.raw", b"", "README.md"),
    )
    (tmp_path / "work").mkdir()
    found = unpack_source(source, tmp_path / "work")
    assert found.kind == "model"
    names = {str(path.relative_to(found.root)): path.read_bytes() for path in found.root.rglob("*") if path.is_file()}
    assert names == {
        "model.safetensors": b"weights",
        ".wh.name": b"no whiteout",
        "deep/config.json": b"{}",
        "README.md": b"",
    }


def test_a_file_is_written_behind_no_link_that_leads_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for number, target in enumerate((str(outside), "../../outside")):
        source = layout_of(
            tmp_path / f"layout{number}",
            ("weight.v1.tar", tar_of({}, {"link": target}), ""),
            ("weight.v1.raw", b"weights", "link/model.safetensors"),
        )
        work = tmp_path / f"work{number}"
        work.mkdir()
        try:
            found = unpack_source(source, work)
        except Corrupt:
            pass
        else:  # as if the model were the root of the file system
            assert list(found.root.rglob("model.safetensors"))
        assert list(outside.iterdir()) == []


def test_what_is_not_what_its_digest_says_is_refused_by_name(tmp_path: Path) -> None:
    source = layout_of(tmp_path / "layout", ("weight.v1.raw", b"weights", "model.safetensors"))
    (source / "blobs" / "sha256" / digest_of(b"weights")[7:]).write_bytes(b"altered")
    (tmp_path / "work").mkdir()
    with pytest.raises(Corrupt, match=digest_of(b"weights")):
        unpack_source(source, tmp_path / "work")


@pytest.mark.parametrize(
    ("kind", "path", "said"),
    [
        ("weight.v1.raw", "../model", "leads out"),
        ("weight.v1.raw", "/model", "absolute path"),
        ("weight.v1.raw", "", "names no file"),
        ("weight.v2.raw", "model", "is of type"),
        ("weight.v1.tar", "../model", "leads out"),
    ],
)
def test_layers_that_cannot_be_are_refused(tmp_path: Path, kind: str, path: str, said: str) -> None:
    source = layout_of(tmp_path / "layout", (kind, b"weights", path))
    (tmp_path / "work").mkdir()
    with pytest.raises(Corrupt, match=said) as failure:
        unpack_source(source, tmp_path / "work")
    assert digest_of(b"weights") in failure.value.what
