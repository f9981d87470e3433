"""`p2pdist pack`: a directory becomes a package in the local layout."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click
import msgspec
from click.core import ParameterSource

from p2pdist.cli import output
from p2pdist.cli.services import encrypt_option, layout_option, opened_layout, opened_origin, origin_option
from p2pdist.model.errors import UNDECODABLE, UsageError
from p2pdist.model.manifest import Descriptor, Reference, parse_reference

if TYPE_CHECKING:
    from p2pdist.package.layers import Layer, PackOptions
    from p2pdist.package.pack import Packed, Settings
    from p2pdist.package.source.project import Format, Project, ProjectFile
    from p2pdist.package.source.scan import Link
    from p2pdist.package.tree.bootstrap import Bootstrapping

DROPPED_SHOWN_MAX = 20
_OF_FILE = re.compile(r"(left out|kept as it is): (.+) \(([^()]*)\)\Z", re.DOTALL)
"""A note about one file, and why."""

NAMED_MAX = 1000
"""Links and files that --json names, of each kind."""
Function = TypeVar("Function", bound=Callable[..., Any])


def settings_options(function: Function) -> Function:
    """The options that say what to run."""
    for option in (
        click.option("--working-dir", metavar="DIR", help="Where the program starts, within the package."),
        click.option(
            "--env", "env", multiple=True, metavar="NAME=VALUE", help="An environment entry; may be repeated."
        ),
        click.option("--entrypoint", metavar="JSON", help="Program and arguments, as a JSON list of strings."),
    ):
        function = option(function)
    return function


def format_option(function: Function) -> Function:
    """The option that says what layers are made of."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["squashfs", "tree"]),
        help="What layers are: one image each, or a tree of files, of which a new version moves only what changed.  "
        "[default: squashfs]",
    )(function)


def _model_format_option(function: Function) -> Function:
    """The option of `format_option`, and models besides."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["squashfs", "tree", "modelpack"]),
        help="What layers are: one image each, a tree of files, of which a new version moves only what changed, or each "
        "file as it is, as a model (ModelPack) that other tools pull too.  [default: squashfs]",
    )(function)


def content_options(function: Function) -> Function:
    """The options that change what of a directory hosts see."""
    for option in (
        click.option(
            "--world-readable",
            is_flag=True,
            help="Let all users read all files, and execute what any user may (chmod a+rX): owners become root.",
        ),
        click.option(
            "--follow-links",
            is_flag=True,
            help="Pack the target files in place of symbolic links that lead out of the package.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of this verb, except the ones for paths, URLs and output."""

    tag: str | None = None
    base: str | None = None
    form: Format | Literal["modelpack"] | None = None
    entrypoint: str | None = None
    env: tuple[str, ...] = ()
    working_dir: str | None = None
    mtime: int | None = None
    level: int | None = None
    xattrs: bool = False
    ignore: tuple[str, ...] = ()
    split: bool = False
    first_party: tuple[str, ...] = ()
    only_used: tuple[Path, ...] = ()
    reproducible: bool = False
    world_readable: bool = False
    follow_links: bool = False
    order: Path | None = None
    bootstrap: bool | None = None


@click.command("pack")
@click.argument("source", type=click.Path(path_type=Path), required=False)
@click.option("-t", "--tag", metavar="NAME:TAG", help="What to call the package, where the project file does not say.")
@click.option("--base", metavar="REF", help="A package to stack on, from the layout or else the origin.")
@_model_format_option
@settings_options
@click.option(
    "--project", type=click.Path(path_type=Path), help="A project file to go by.  [default: SOURCE/p2pdist.toml]"
)
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Leave out what matches, as in .gitignore; may be repeated."
)
@click.option(
    "--split",
    is_flag=True,
    help="Make layers of a virtual environment: third-party below, then what a run compiled of it, your own code on top.",
)
@click.option(
    "--first-party", multiple=True, metavar="NAME", help="With --split: a distribution that is your own code."
)
@click.option(
    "--only-used",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Keep only what a run used, as p2pdist trace recorded it; may be repeated.",
)
@click.option(
    "--order",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRACE",
    help="Lay new contents out as p2pdist trace export says that a start reads them (trees only).",
)
@click.option(
    "--bootstrap/--no-bootstrap",
    default=None,
    help="Add what shows the package on a host before its catalogs are there, by which a lazy start begins sooner "
    "(trees only).  [default: for many files, but not for small additions]",
)
@click.option(
    "--reproducible", is_flag=True, help="Make equal packages of equal checkouts, whenever and wherever they were made."
)
@click.option(
    "--mtime",
    type=int,
    metavar="SECONDS",
    help="Give all files this modification time (since 1970), in trees at most this.",
)
@click.option("--level", type=int, help="zstd level of images, 1 to 22.  [default: 6]")
@click.option("--xattrs", is_flag=True, help="Keep extended attributes user.* (trees only).")
@content_options
@click.option("--push", "pushed", is_flag=True, help="Send the package to the origin as well, as p2pdist push does.")
@encrypt_option()
@layout_option
@origin_option
@output.quiet_options
@output.json_option
def command(
    source: Path | None,
    *,
    project: Path | None,
    pushed: bool,
    encrypt_to: str | None,
    layout: Path,
    origin: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Pack the directory SOURCE as a package into the local layout.

    Equal files, modes and modification times give an equal package. Device nodes, sockets, FIFOs,
    setuid bits and file capabilities are left out and named; with a --base, whiteouts (character
    devices 0/0) stay. Files that match a pattern in SOURCE/.p2pdistignore are left out, too.
    Symbolic links are packed as links; warnings name links that lead out of the package or nowhere,
    and files that only their owner may read. The links of a Hugging Face snapshot to the blobs of
    its cache are packed as files.

    The project file p2pdist.toml in SOURCE, or without SOURCE in this directory, may say most of
    this: name, tag, base, entrypoint, working_dir, format, ignore, a table [env], and for several
    layers tables [[layer]] with source, format, only, ignore and target. Options win over it.

    --reproducible takes times later than SOURCE_DATE_EPOCH (else 1980) as that time, keeps of
    permissions whether the owner may execute a file, and compiles .pyc files anew to hash-based
    ones.

    \b
    Example:
      p2pdist pack ./env -t team/env:2024-05
      p2pdist pack ./app -t team/trainer:v1 --base team/env:1 --entrypoint '["python", "t.py"]'
      p2pdist pack ./venv -t team/trainer:v2 --format tree --split --first-party trainer
      p2pdist pack ./llama -t models/llama:v3 --format modelpack
    """
    if not pushed and click.get_current_context().get_parameter_source("encrypt_to") is ParameterSource.COMMANDLINE:
        raise UsageError("--encrypt-to encrypts what is pushed, and the layout is not", remedy="Add --push")
    packed, notes = pack_source(source, Choices(**choices), layout, origin, project=project, quiet=as_json)
    more = _push(packed, layout, origin, encrypt_to, quiet=as_json) if pushed else {}
    show_packed(packed, notes, as_json=as_json, **more)


def _push(
    packed: Packed, layout: Path, origin: str | None, encrypt_to: str | None, *, quiet: bool
) -> dict[str, object]:
    """Send what was packed to the origin; returns what is to be said of that, in the JSON document.
    Raises what pushing raises."""
    from p2pdist.cli.verbs.push import push_package

    sent, _ = push_package(packed.reference, layout, origin, torrent=False, quiet=quiet, encrypt_to=encrypt_to)
    if not quiet:
        output.note(
            f"{output.amount(sent.bytes_sent)} sent, {output.amount(sent.bytes_skipped)} already there, {sent.seconds:.1f} s"
            f"{', encrypted' if encrypt_to else ''}"
        )
    more: dict[str, object] = {"encrypted_as": sent.digest} if encrypt_to else {}
    return {"bytes_sent": sent.bytes_sent, "bytes_skipped": sent.bytes_skipped, **more}


def pack_source(
    source: Path | None, given: Choices, layout: Path, origin: str | None, *, project: Path | None = None, quiet: bool
) -> tuple[Packed, list[str]]:
    """Pack a directory, as its project file says where `given` does not; returns notes for the user
    as well. Raises what packing raises."""
    from p2pdist.package.layers import pack_layers
    from p2pdist.package.source.project import find_project

    file = find_project(source, project)
    described = file.project if file else None
    reference = _reference(given, described)
    if given.form == "modelpack":
        with output.Progress(quiet=quiet) as progress:
            packed = asyncio.run(_pack_model(source, given, file, reference, layout, progress))
        return packed, _passed_over(file)
    options = _pack_options(given, described)
    layers, notes = _layers(source, given, file)

    async def work(progress: output.Progress) -> tuple[Packed, list[str]]:
        async with opened_layout(layout) as local, opened_origin(origin) as central:
            return await pack_layers(layers, reference, local, options, origin=central, on_progress=progress)

    with output.Progress(quiet=quiet) as progress:
        packed, more = asyncio.run(work(progress))
    return packed, [*notes, *more]


async def _pack_model(
    source: Path | None,
    given: Choices,
    file: ProjectFile | None,
    reference: Reference,
    layout: Path,
    progress: output.Progress,
) -> Packed:
    """Make a model. Raises UsageError for an option that means nothing to one, and for a project
    file that packs something else than the source."""
    from p2pdist.package.layers import plain_layer
    from p2pdist.package.modelpack import pack_model

    if source is None:
        raise UsageError("no directory is named that is to become a model", remedy="Write p2pdist pack DIR ...")
    for field in fields(given):
        value = getattr(given, field.name)
        if value not in (None, False, ()) and field.name not in ("tag", "form", "ignore", "follow_links"):
            option = field.name.replace("_", "-")
            raise UsageError(f"--{option} says nothing of a model", remedy="Leave it away, or pack a tree")
    project = file.project if file else None
    for key in ("base", "layer"):
        if file is not None and getattr(file.project, key):
            raise UsageError(f"{file.path}: `{key}` says nothing of a model", remedy="Leave it away, or pack a tree")
    ignore = plain_layer(source, "tree", given.ignore, project).ignore
    async with opened_layout(layout) as local:
        return await pack_model(
            source, reference, local, ignore=ignore, follow_links=given.follow_links, on_progress=progress
        )


def _passed_over(file: ProjectFile | None) -> list[str]:
    """A note of what a project file says of a program, which a model has not: the same directory
    may be packed for one as well."""
    keys = [key for key in ("entrypoint", "env", "working_dir") if file and getattr(file.project, key)]
    return [f"{file.path}: a model has no {', '.join(keys)}"] if file and keys else []


def _reference(given: Choices, project: Project | None) -> Reference:
    name = given.tag or (project.reference if project else "")
    if not name:
        raise UsageError("the package has no name", remedy="Give -t NAME:TAG, or `name` in p2pdist.toml")
    return parse_reference(name)


def _pack_options(given: Choices, project: Project | None) -> PackOptions:
    from p2pdist.cli.verbs.trace import read_trace_file
    from p2pdist.package.image.reproducible import clamp_time
    from p2pdist.package.image.squashfs import LEVEL
    from p2pdist.package.layers import PackOptions

    base = given.base if given.base is not None else project.base if project else None
    mtime = given.mtime
    if given.reproducible and mtime is None:
        mtime = clamp_time(os.environ)
    return PackOptions(
        base=parse_reference(base) if base is not None else None,
        settings=_settings(given, project),
        level=LEVEL if given.level is None else given.level,
        mtime=mtime,
        xattrs=given.xattrs,
        reproducible=given.reproducible,
        world_readable=given.world_readable,
        follow_links=given.follow_links,
        order=read_trace_file(given.order).parts if given.order is not None else (),
        bootstrapping=None if given.bootstrap is False else bootstrapping(always=bool(given.bootstrap)),
    )


def bootstrapping(*, always: bool = False) -> Bootstrapping:
    """How packages get bootstraps."""
    from p2pdist.mount.erofs.writer import device_image
    from p2pdist.package.tree.bootstrap import Bootstrapping

    return Bootstrapping(device_image, always)


def _settings(given: Choices, project: Project | None) -> Settings:
    from p2pdist.package.pack import Settings

    settings = Settings(parse_entrypoint(given.entrypoint), given.env, given.working_dir)
    if project is None:
        return settings
    return Settings(
        project.entrypoint if settings.entrypoint is None else settings.entrypoint,
        (*(f"{name}={value}" for name, value in project.env.items()), *settings.env),
        project.working_dir if settings.working_dir is None else settings.working_dir,
    )


def _check_holds(source: Path, file: ProjectFile) -> None:
    """Raises UsageError where layers of a project file are elsewhere than in the directory that was
    named and that of the file: another one would be packed than the user names."""
    from p2pdist.package.source.scan import source_directory

    sources = [source_directory(file.source(layer)) for layer in file.project.layer]
    if source != file.path.parent.resolve() and not all(layer.is_relative_to(source) for layer in sources):
        raise UsageError(
            f"the layers of {file.path} say what is packed, and {source} does not hold all of them",
            remedy="Leave the directory away, or the layers",
        )


def _layers(source: Path | None, given: Choices, file: ProjectFile | None) -> tuple[list[Layer], list[str]]:
    """What goes into each layer, and notes for the user."""
    from p2pdist.package.layers import plain_layer, project_layers, split_layer, used_layer
    from p2pdist.package.source.scan import source_directory
    from p2pdist.package.source.trace import merge, read_trace

    chosen = cast("Format | None", given.form)  # a model has been packed elsewhere
    form = chosen or (file.project.format if file else None) or "squashfs"
    if file is not None and (source is None or file.project.layer):
        if source is not None:
            _check_holds(source_directory(source), file)
        layers = project_layers(file, form, given.ignore)
    else:
        layers = [plain_layer(cast(Path, source), form, given.ignore, file.project if file else None)]
    if chosen:
        layers = [replace(layer, form=chosen) for layer in layers]
    if (given.split or given.only_used) and len(layers) != 1:
        raise UsageError("--split and --only-used need a single directory", remedy="Leave them away, or the layers")
    if given.first_party and not given.split:
        raise UsageError("--first-party says something about --split, which is not given", remedy="Give --split, too")
    notes: list[str] = []
    if given.only_used:
        layers[0], note = used_layer(layers[0], merge([read_trace(trace) for trace in given.only_used]))
        notes += note
    if given.split:
        layers, note = split_layer(layers[0], given.first_party)
        notes += note
    return layers, notes


def parse_entrypoint(text: str | None) -> list[str] | None:
    """The list of strings that --entrypoint gives as JSON. Raises UsageError."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(os.fsencode(text), type=list[str])
    except UNDECODABLE as error:
        raise UsageError(
            f"the entrypoint {text[:100]!r} is not a JSON list of strings",
            remedy="""Write it as '["python", "-m", "train"]'""",
        ) from error


def layer_fields(layer: Descriptor) -> dict[str, object]:
    """A layer in the JSON document."""
    return {"digest": layer.digest, "size": layer.size, "mediaType": layer.media_type}


def _link_fields(link: Link) -> dict[str, str]:
    from p2pdist.model.errors import printable

    return {"path": printable(link.path), "target": printable(link.target), "what": link.what}


def _joined(notes: list[str]) -> list[str]:
    """Notes for people: what happened to several files for one reason is one line, where the first
    of them stood."""
    groups: dict[str, list[str]] = {}
    for note in notes:
        match = _OF_FILE.match(note)
        groups.setdefault(f"{match[1]}\0{match[3]}" if match else note, []).append(match[2] if match else note)
    lines = []
    for key, files in groups.items():
        what, separator, why = key.partition("\0")
        if not separator:
            lines.append(key)
        elif len(files) == 1:
            lines.append(f"{what}: {files[0]} ({why})")
        else:
            lines.append(f"{what}: {len(files)} files ({why}), such as {files[0]}; --json names all")
    return lines


def show_dropped(packed: Packed) -> None:
    """Say what was left out. These are warnings, which --quiet leaves."""
    from p2pdist.model.errors import printable

    for item in packed.dropped[:DROPPED_SHOWN_MAX]:
        output.line(f"left out: {printable(item.path)} ({item.what})")
    if packed.dropped_total > DROPPED_SHOWN_MAX:
        output.line(f"left out: {packed.dropped_total - DROPPED_SHOWN_MAX} more")


def dropped_fields(packed: Packed) -> dict[str, object]:
    """What was left out, in the JSON document."""
    from p2pdist.model.errors import printable

    dropped = [{"path": printable(item.path), "what": item.what} for item in packed.dropped]
    return {"dropped": dropped, "dropped_total": packed.dropped_total}


def show_packed(packed: Packed, notes: list[str], *, as_json: bool, **more: object) -> None:
    """Print what was packed; `more` are further fields of the JSON document."""
    from p2pdist.model.errors import printable

    show_dropped(packed)
    notes = [*packed.warnings, *notes]
    shown = _joined(notes)
    for note in shown[:DROPPED_SHOWN_MAX]:
        output.note(note)
    if len(shown) > DROPPED_SHOWN_MAX:
        output.note(f"and {len(shown) - DROPPED_SHOWN_MAX} more notes; --json prints all")
    if as_json:
        output.print_json(
            {
                "reference": str(packed.reference),
                "digest": packed.digest,
                "layers": [layer_fields(layer) for layer in packed.layers],
                "files": packed.files,
                "bytes_total": packed.bytes_total,
                "bytes_written": packed.bytes_written,
                "seconds": round(packed.seconds, 3),
                **dropped_fields(packed),
                "links": [_link_fields(link) for link in packed.links[:NAMED_MAX]],
                "links_total": len(packed.links),
                "followed": [_link_fields(link) for link in packed.followed[:NAMED_MAX]],
                "followed_total": len(packed.followed),
                "owner_only": [printable(path) for path in packed.narrow[:NAMED_MAX]],
                "owner_only_total": len(packed.narrow),
                "notes": notes,
                **more,
            }
        )
        return
    click.echo(f"{packed.reference}  {packed.digest}")
    if output.is_quiet():
        return
    if packed.parts:  # the layer of a tree is a list; what moves are packs
        became = f"package of {output.contents(packed.layers, packed.parts)}"
    else:
        layers = output.counted(len(packed.layers), "layer")
        became = f"layer {output.amount(packed.layers[-1].size)}, {layers}"
    click.echo(
        f"{output.counted(packed.files, 'file')}, {output.amount(packed.bytes_total)} -> {became}, {packed.seconds:.1f} s"
    )
