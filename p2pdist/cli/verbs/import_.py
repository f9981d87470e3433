"""`p2pdist import`: a tar or a container image becomes a package in the local layout."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdist.cli import output
from p2pdist.cli.references.names import offer_files
from p2pdist.cli.services import layout_option, opened_layout
from p2pdist.cli.verbs.pack import (
    bootstrapping,
    content_options,
    format_option,
    parse_entrypoint,
    settings_options,
    show_packed,
)
from p2pdist.model.errors import P2PDistError, UsageError
from p2pdist.model.image import ImageReference, is_image, parse_image
from p2pdist.model.manifest import Config, Reference, parse_reference
from p2pdist.model.platform import parse_platform
from p2pdist.model.upstream import parse_upstream

if TYPE_CHECKING:
    from p2pdist.origin.layout import LocalLayout
    from p2pdist.package.archive.import_ import Unpacked
    from p2pdist.package.pack import Packed, Settings
    from p2pdist.package.source.project import Format

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that names no PATH, as container runtimes have it. Its programs would be looked for
in the caller's PATH alone."""


@click.command("import")
@click.argument("source", shell_complete=offer_files)
@click.argument("name", metavar="[NAME:TAG]", required=False)
@click.option("-t", "--tag", metavar="NAME:TAG", help="What to call the package.")
@click.option("--image", default="", metavar="NAME", help="Which image, where there are several: name, tag or digest.")
@click.option(
    "--platform", default="", metavar="OS/ARCH[/VARIANT]", help="Which platform's image.  [default: this machine's]"
)
@click.option(
    "--upstream",
    metavar="NAME[=URL]",
    help="Where the registry of an image docker://NAME/... is reached  [default: https, on this machine http].",
)
@format_option
@settings_options
@content_options
@layout_option
@output.quiet_options
@output.json_option
def command(
    source: str,
    name: str | None,
    *,
    tag: str | None,
    upstream: str | None,
    image: str,
    platform: str,
    form: Format | None,
    follow_links: bool,
    world_readable: bool,
    layout: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Make a package of SOURCE: a directory, a tar (also .gz, .zst, .xz, .bz2; - is standard
    input), an OCI image layout, or what docker save or skopeo copy ... dir:PATH writes, unpacked or
    not; or of an image docker://REGISTRY/NAME:TAG, which comes straight from its registry. Its
    credentials are those of docker login.

    The layers of an image are merged into one. Its entrypoint, command, environment and working
    directory are kept; options win over them. Its user, owners, devices, setuid bits and file
    capabilities are not kept; p2pdist run --root enters the image. Of the images of an index the
    first that this machine runs is taken.

    \b
    Example:
      docker save team/trainer:v3 -o trainer.tar
      p2pdist import trainer.tar -t team/trainer:v3 --format tree
      p2pdist import docker://registry.example.org/team/trainer:v3 -t team/trainer:v3
    """
    from p2pdist.package.source.scan import source_path

    if not source:
        raise UsageError("the source is an empty name", remedy="Name a directory, an archive or docker://...")
    source = "/dev/stdin" if source == "-" else source
    if (tag is None) == (name is None):
        raise UsageError("say once what to call the package", remedy="Write -t NAME:TAG")
    reference = parse_reference(tag or name or "")
    parse_entrypoint(settings["entrypoint"])
    if upstream is not None and not is_image(source):
        raise UsageError(
            "--upstream is for images of registries", remedy="Name the image as docker://REGISTRY/NAME:TAG"
        )
    importing = _Import(
        _Registered(parse_image(source), upstream or "")
        if is_image(source)
        else source_path(Path(source), "directory or archive"),
        reference,
        form or "squashfs",
        follow_links=follow_links,
        world_readable=world_readable,
        settings=settings,
    )
    with output.Progress(quiet=as_json) as progress:
        packed, notes, kind = asyncio.run(importing.run(layout, image, platform, progress))
    show_packed(packed, notes, as_json=as_json, kind=kind)


@dataclass(frozen=True, slots=True)
class _Registered:
    """An image at a registry, and where that is reached, as `NAME=URL`, "" for where its name
    says."""

    reference: ImageReference
    upstream: str

    async def download(self, folder: Path, platform: str, progress: output.Progress) -> None:
        """Write the image as a layout into an empty directory. Raises what the registry and the
        disk do."""
        from p2pdist.origin.registry.download import download_image
        from p2pdist.origin.registry.upstream import UpstreamRegistry
        from p2pdist.package.archive.import_ import this_platform

        name = self.reference.name
        settings = parse_upstream(self.upstream or name.upstream)
        if settings.name != name.upstream:
            raise UsageError(
                f"--upstream names {settings.name}, and the image is at {name.upstream}",
                remedy="Give the upstream of the image, or leave --upstream away",
            )
        target, exact = parse_platform(platform) if platform else (this_platform(), True)
        registry = UpstreamRegistry(settings)
        try:
            repository = registry.repository(name.repository)
            await download_image(self.reference, repository, target, folder, exact=exact, report=progress)
        finally:
            await registry.close()


@dataclass(frozen=True, slots=True)
class _Import:
    """A source that becomes a package; `settings` are the options that say what to run."""

    source: Path | _Registered
    reference: Reference
    form: Format
    follow_links: bool
    world_readable: bool
    settings: dict[str, Any]

    async def run(
        self, layout: Path, image: str, platform: str, progress: output.Progress
    ) -> tuple[Packed, list[str], str]:
        """The package, notes for the user, and the kind of source. Raises UsageError and what
        unpacking and packing raise."""
        from p2pdist.package.archive.import_ import unpack_source
        from p2pdist.package.thread import stoppable, until

        async with opened_layout(layout) as local:
            with ExitStack() as stages:
                source = self.source
                if isinstance(source, _Registered):
                    folder = stages.enter_context(local.stage_directory(f"{source.reference} downloaded"))
                    await source.download(folder, platform, progress)
                    source = folder
                stage = stages.enter_context(local.stage_directory(f"{source.absolute()} imported"))
                stopped = threading.Event()
                report = until(stopped, progress)
                unpacked = await stoppable(
                    stopped, unpack_source, source, stage, image=image, platform=platform, form=self.form, report=report
                )
                if (image or platform) and unpacked.kind in ("directory", "tar"):
                    raise UsageError(
                        f"{source} is no image, of which --image and --platform could choose",
                        remedy="Leave them away, or name an OCI image layout or what docker save or skopeo writes",
                    )
                if self.follow_links and unpacked.kind != "directory":
                    raise UsageError(
                        f"the links of an archive ({source}) are not followed", remedy="Leave --follow-links away"
                    )
                replaced = self.settings["entrypoint"] is not None
                notes = [*unpacked.notes, *await asyncio.to_thread(_notes, unpacked, replaced=replaced)]
                packed, more = await self._pack(unpacked, local, progress)
        dropped = (*unpacked.seen.dropped, *packed.dropped)
        total = unpacked.seen.dropped_total + packed.dropped_total
        return replace(packed, dropped=dropped, dropped_total=total), [*notes, *more], unpacked.kind

    async def _pack(
        self, unpacked: Unpacked, local: LocalLayout, progress: output.Progress
    ) -> tuple[Packed, list[str]]:
        from p2pdist.package.layers import Layer, PackOptions, pack_layers
        from p2pdist.package.source.scan import source_directory

        options = PackOptions(
            settings=_settings(unpacked, **self.settings),
            world_readable=self.world_readable,
            follow_links=self.follow_links,
            xattrs=self.form == "tree" and unpacked.kind != "directory",
            bootstrapping=bootstrapping(),
        )
        # In an image modes and absolute links are meant for a system of its own.
        warn = unpacked.kind in ("directory", "tar")
        layer = Layer(source_directory(unpacked.root), self.form, warn=warn, modes=unpacked.modes)
        return await pack_layers([layer], self.reference, local, options, on_progress=progress)


def _notes(unpacked: Unpacked, *, replaced: bool) -> list[str]:
    """What of an image is not as it is in a container; `replaced`: another program was named."""
    notes = []
    if unpacked.config.entrypoint and not replaced:
        notes.append(
            "p2pdist run starts the image's program from where the package is seen, and does not enter the image: files and libraries that "
            "the program names by absolute paths are this host's. p2pdist run --root enters it"
        )
        notes += _program_notes(str(unpacked.root.resolve()), unpacked.config)
    if unpacked.user.partition(":")[0] not in ("", "0", "root"):
        notes.append(
            f"the image's user {unpacked.user} is not kept: p2pdist run starts the program as the user that calls it"
        )
    return notes


def _program_notes(root: str, config: Config) -> list[str]:
    """Whether the program that the image names is in it."""
    from p2pdist.mount.executable import Search

    path = next((entry for entry in config.env if entry.startswith("PATH=")), _PATH).removeprefix("PATH=")
    packaged = ":".join(root + entry for entry in path.split(":") if entry.startswith("/"))
    search = Search({"PATH": packaged}, os.path.normpath(f"{root}/{config.working_dir}"), root)
    try:
        program = search.executable(config.entrypoint).path
    except P2PDistError as error:
        return [f"the image's program is not in it, or cannot start: {error.what.replace(root, '')}"]
    if program.startswith(f"{root}/"):
        return []
    return [f"the image's program {config.entrypoint[0]} is not in it: p2pdist run takes {program} of the host"]


def _settings(unpacked: Unpacked, *, entrypoint: str | None, env: tuple[str, ...], working_dir: str | None) -> Settings:
    from p2pdist.package.pack import Settings

    program, config = parse_entrypoint(entrypoint), unpacked.config
    image = unpacked.kind not in ("directory", "tar")
    path = (_PATH,) if image and not any(entry.startswith("PATH=") for entry in config.env) else ()
    return Settings(
        config.entrypoint if program is None else program,
        (*path, *config.env, *env),
        config.working_dir if working_dir is None else working_dir,
    )
