"""The project file, `p2pdist.toml`: how a directory is packed, so that `p2pdist pack` needs no
options.

    name = "team/trainer"
    tag = "v3"                      # "latest" when it is left out
    base = "team/cuda:12"           # a package to stack on
    entrypoint = ["python", "-m", "train"]
    working_dir = "app"
    format = "tree"
    ignore = ["*.log", "/data/"]    # patterns as in a .gitignore file

    [env]
    OMP_NUM_THREADS = "8"

    [[layer]]                       # bottom to top; without any, the file's directory is the layer
    source = "venv"                 # relative to the file
    ignore = ["*.a"]
    [[layer]]
    source = "src"
    only = ["/train/**", "/configs/**"]
    target = "app"                  # the directory within the package where it appears

Keys may be written with hyphens, too. An unknown key is refused, since it would be a misspelt one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from p2pdist.files import decoded, read_content
from p2pdist.model.errors import NotFound, TooLarge, UsageError
from p2pdist.model.manifest import LAYERS_MAX
from p2pdist.package.source.scan import source_directory

PROJECT_FILE = "p2pdist.toml"
PROJECT_BYTES_MAX = 1 << 20
TARGET_DEPTH_MAX = 100

Format = Literal["squashfs", "tree"]


class ProjectLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer: a directory, relative to the project file, and what of it goes where. Without
    `format` it has the project's."""

    source: str
    format: Format | None = None
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target: str = ""


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says. `ignore` holds for every layer; None is what it does not say."""

    name: str = ""
    tag: str = ""
    base: str | None = None
    entrypoint: tuple[str, ...] | None = None
    env: dict[str, str] = {}
    working_dir: str | None = None
    format: Format | None = None
    ignore: tuple[str, ...] = ()
    layer: tuple[ProjectLayer, ...] = ()

    @property
    def reference(self) -> str:
        """The package's name and tag, "" when the file gives no name."""
        return f"{self.name}:{self.tag or 'latest'}" if self.name else ""


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A project file that was read: where it lies and what it says."""

    path: Path
    project: Project

    def source(self, layer: ProjectLayer) -> Path:
        """The directory of a layer."""
        return self.path.parent / layer.source


def find_project(source: Path | None, named: Path | None) -> ProjectFile | None:
    """The project file that was named, else the one in `source`, else, without a source, the one in
    the working directory, which must be there. Raises UsageError and what read_project raises."""
    if named is not None:
        return read_project(named)
    file = (source_directory(source) if source else Path()) / PROJECT_FILE
    if os.path.isfile(file):
        return read_project(file)
    if source is None:
        raise UsageError(
            f"no directory is named, and there is no {PROJECT_FILE} here",
            remedy="Name the directory to pack, or the project file with --project",
        )
    return None


def read_project(file: Path) -> ProjectFile:
    """Read and check a project file. Raises NotFound, and UsageError naming the key that is
    wrong."""
    try:
        data = read_content(file, PROJECT_BYTES_MAX).data
    except FileNotFoundError as error:
        raise NotFound(f"there is no project file {file}", remedy="Check --project") from error
    except OSError as error:
        raise UsageError(
            f"cannot read the project file {file}: {error.strerror}", remedy="Name a file that this user may read"
        ) from error
    if len(data) > PROJECT_BYTES_MAX:
        raise TooLarge(
            f"the project file {file} is over {PROJECT_BYTES_MAX} bytes", remedy="Name the right one with --project"
        )
    import tomllib  # where there is a project file alone

    try:
        project = msgspec.convert(_underscored(tomllib.loads(decoded(data))), Project)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{file} is not a TOML file: {error}", remedy="Correct that place; see https://toml.io"
        ) from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {error}", remedy="See p2pdist pack --help for the keys") from error
    if len(project.layer) > LAYERS_MAX:
        raise UsageError(
            f"{file} has {len(project.layer)} layers, over the limit of {LAYERS_MAX}", remedy="Join some of them"
        )
    for name in project.env:
        if not name or "=" in name:
            raise UsageError(
                f"{file}: {name[:200]!r} is no name of an environment entry", remedy='Write NAME = "value"'
            )
    for layer in project.layer:
        check_target(layer.target, file)
    return ProjectFile(file, project)


def check_target(target: str, file: Path) -> None:
    """Raises UsageError unless `target` is a relative path that stays within the package."""
    if target.startswith("/") or "\0" in target or any(part in ("..", ".", "") for part in target.split("/") if target):
        raise UsageError(f"{file}: the target {target[:200]!r} is not a path within the package", remedy='Write "app"')
    if target.count("/") >= TARGET_DEPTH_MAX:
        raise UsageError(
            f"{file}: the target {target[:200]!r}... is more than {TARGET_DEPTH_MAX} directories deep",
            remedy='Write a shorter one, such as "app"',
        )


def _underscored(body: dict[str, Any]) -> dict[str, Any]:
    """Keys with underscores for hyphens, in layers too; environment names stay as they are."""
    plain = {key.replace("-", "_"): value for key, value in body.items()}
    if isinstance(plain.get("layer"), list):
        plain["layer"] = [_underscored(item) if isinstance(item, dict) else item for item in plain["layer"]]
    return plain
