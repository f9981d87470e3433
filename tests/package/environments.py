"""Real virtual environments with wheels made by hand."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path


def make_environment(place: Path) -> Path:
    """A virtual environment without anything in it."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, capture_output=True, timeout=120
    )
    return place


def make_wheel(directory: Path, name: str, files: dict[str, str]) -> Path:
    """A wheel (packaging.python.org, "Binary distribution format") of pure Python with a console
    script."""
    info = f"{name}-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n",
    }
    rows = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def install(environment: Path, *wheels: Path) -> None:
    """By pip, without any index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment / "bin/python",
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
        *wheels,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def install_editable(environment: Path, name: str, project: Path) -> None:
    """What `pip install -e` leaves (PEP 610, PEP 660)."""
    site = site_of(environment)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    (site / f"__editable__.{name}.pth").write_text(f"{project}\n")
    names = [f"__editable__.{name}.pth", *(f"{info.name}/{part}" for part in ("METADATA", "direct_url.json", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{each},,\n" for each in names))


def site_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python3.*/site-packages"))
