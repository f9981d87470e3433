"""The image of bench.stargz, as an OCI layout of two layers: this interpreter with its standard
library and the shared libraries that ldd names, and a package's files below ROOT.

The image has the host's paths for what is the host's, so it needs no configuration of the linker;
files that are links there are copied. Nothing in it depends on the time, so the same files have
the same digests. An eStargz can put a file first only if the directories above it are entries too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROOT = "/site"


class Hashed:
    """A stream that hashes what it passes on."""

    def __init__(self, output: Any) -> None:
        self._output, self._sha256 = output, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self._output.write(data)
        return len(data)

    def flush(self) -> None:
        self._output.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def libraries(objects: Sequence[Path]) -> set[Path]:
    """Where the shared libraries are that these files need."""
    shown = subprocess.run(["ldd", *map(str, objects)], capture_output=True, text=True, check=False).stdout
    needed = (line.rpartition("=>")[2].split()[0] for line in shown.splitlines() if line.startswith("\t"))
    return {Path(os.path.normpath(path)) for path in needed if path.startswith("/")}


def interpreter(source: Path) -> Iterator[tuple[Path, str]]:
    """The files of the host that the program needs, and the directories above them, which eStargz
    wants named, each with its path in the image."""
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test"}
    paths = [path for path in sorted(library.rglob("*")) if not left_out & set(path.relative_to(library).parts)]
    files = [python, *(path for path in paths if path.is_file())]
    objects = [path for path in (*files, *source.rglob("*.so*")) if path.is_file() and ".so" in path.name]
    shared = (path for path in libraries([python, *objects]) if source not in path.parents)
    files += sorted(shared)
    directories = {parent for path in files for parent in path.parents[:-1]}
    for path in (*sorted(directories), *files):
        yield path.resolve(), str(path)


def site(source: Path) -> Iterator[tuple[Path, str]]:
    """The package's files, each with its path in the image."""
    for path in (source, *sorted(source.rglob("*"))):
        yield path, os.path.normpath(f"{ROOT}/{path.relative_to(source)}")


def put(blobs: Path, write: Callable[[BinaryIO], str], media_type: str) -> tuple[dict[str, Any], str]:
    """Write a blob of an OCI layout: its descriptor, and what `write` answers."""
    partial = blobs / "partial"
    with partial.open("wb") as file:
        hashed = Hashed(file)
        answer = write(hashed)  # type: ignore[arg-type]
    size = partial.stat().st_size
    partial.rename(blobs / hashed.digest.partition(":")[2])
    return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": hashed.digest, "size": size}, answer


def put_layer(blobs: Path, files: Iterable[tuple[Path, str]], level: int) -> tuple[dict[str, Any], str]:
    """Write a layer: its descriptor, and the digest of what it decompresses to."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    def write(output: BinaryIO) -> str:
        with gzip.GzipFile(fileobj=output, mode="wb", compresslevel=level, mtime=0) as compressed:
            plain = Hashed(compressed)
            with tarfile.open(fileobj=plain, mode="w|", format=tarfile.GNU_FORMAT) as tar:  # type: ignore[call-overload]
                for path, name in files:
                    tar.add(path, name, recursive=False, filter=owned)
            return plain.digest

    return put(blobs, write, "layer.v1.tar+gzip")


def write_layout(layout: Path, source: Path, name: str, level: int) -> None:
    """The image, as an OCI layout, with layers compressed at a level of gzip."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = [put_layer(blobs, files, level) for files in (interpreter(source), site(source))]

    def put_json(document: dict[str, Any], media_type: str) -> dict[str, Any]:
        data = json.dumps(document).encode()
        return put(blobs, lambda output: str(output.write(data)), media_type)[0]

    rootfs = {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]}
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": [f"P2PDIST_ROOT={ROOT}"]}, "rootfs": rootfs}
    manifest = {
        "schemaVersion": 2,
        "config": put_json(config, "config.v1+json"),
        "layers": [each for each, _ in layers],
    }
    entry = put_json(manifest, "manifest.v1+json") | {"annotations": {"io.containerd.image.name": name}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
