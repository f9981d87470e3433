"""Having a runtime ask the mirror, and taking that back: plans what each file is to say, then
writes record and files, all or none of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from p2pdist.cli.runtimes import edits
from p2pdist.cli.runtimes.files import HostFiles
from p2pdist.cli.runtimes.record import Installation, Record, WrittenFile, load_record, save_record, text_digest
from p2pdist.cli.runtimes.runtimes import all_notes, runtime_of
from p2pdist.model.errors import P2PDistError


class Change(msgspec.Struct, frozen=True):
    """What becomes of a file: `created`, `changed`, `restored` (as it was before), `removed`, or
    `unchanged`."""

    path: str
    change: str
    before: str | None
    after: str | None


class Outcome(msgspec.Struct, frozen=True):
    """What was done, what to know, and what to do next."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Planned:
    change: Change
    kept: WrittenFile | None
    """None when the file is ours no longer."""


def install(files: HostFiles, name: str, installation: Installation, *, dry_run: bool = False) -> Outcome:
    """Have a runtime ask a mirror for these upstreams too; those that it asks for already stay.
    Raises P2PDistError with nothing changed."""
    with files.locked():
        record = load_record(files)
        former = record.runtimes.get(name)
        upstreams = dict.fromkeys([*(former.upstreams if former else ()), *installation.upstreams])
        installation = msgspec.structs.replace(
            installation,
            upstreams=tuple(upstreams),
            certs_dir=installation.certs_dir or (former.certs_dir if former else ""),
        )
        return _change(files, record, record.runtimes | {name: installation}, name, dry_run=dry_run)


def uninstall(files: HostFiles, name: str, upstreams: tuple[str, ...] = (), *, dry_run: bool = False) -> Outcome:
    """Take back what `install` wrote for a runtime, or for some of its upstreams. Raises
    P2PDistError with nothing changed."""
    with files.locked():
        record = load_record(files)
        runtimes = dict(record.runtimes)
        if name in runtimes:
            left = tuple(upstream for upstream in runtimes[name].upstreams if upstreams and upstream not in upstreams)
            if left:
                runtimes[name] = msgspec.structs.replace(runtimes[name], upstreams=left)
            else:
                del runtimes[name]
        return _change(files, record, runtimes, name, dry_run=dry_run)


def _change(
    files: HostFiles, record: Record, runtimes: dict[str, Installation], name: str, *, dry_run: bool
) -> Outcome:
    wanted = msgspec.structs.replace(record, runtimes=runtimes)
    plan = list(_plan(files, record, wanted))
    if not dry_run:
        _carry_out(files, record, wanted, plan)
    runtime = runtime_of(name)
    changes = tuple(planned.change for planned in plan)
    notes = all_notes(files, runtime, runtimes[name]) if name in runtimes else []
    notes += _left(record, plan)
    changed = any(change.change != "unchanged" for change in changes)
    return Outcome(changes, tuple(notes), (runtime.after,) if changed and not dry_run else ())


def _left(record: Record, plan: list[_Planned]) -> Iterator[str]:
    """Of the files from which the mirror was to go, those that name it still."""
    for path, text in ((planned.change.path, planned.change.after) for planned in plan if planned.kept is None):
        if path in record.files and text is not None and edits.names_mirror(text, record.addresses):
            yield (
                f"{path} was edited since it was written, and still names the mirror: if that is not meant to stay, "
                "take it away by hand"
            )


def _plan(files: HostFiles, record: Record, wanted: Record) -> Iterator[_Planned]:
    adds = {
        edit.path: edit.add
        for name, installation in wanted.runtimes.items()
        for edit in runtime_of(name).edits(files, wanted, installation)
    }
    for path in sorted(adds.keys() | record.files.keys()):
        current, kept = files.read(path), record.files.get(path)
        before = _before(path, current, kept, record)
        after = adds[path](before) if path in adds else before
        if after == current:
            change = "unchanged"
        elif after is None:
            change = "removed"
        elif current is None:
            change = "created"
        else:
            change = "changed" if path in adds else "restored"
        keep = None
        if path in adds and after is not None and after != before:
            keep = WrittenFile(before, text_digest(after))
        yield _Planned(Change(path, change, current, after), keep)


def _before(path: str, current: str | None, kept: WrittenFile | None, record: Record) -> str | None:
    """What a file said, or would say, without the mirror."""
    if current is None:
        return None
    if kept is not None and text_digest(current) == kept.wrote:
        return kept.before
    if path.endswith(".json"):
        # Without a record of it, a mirror in there is the administrator's.
        stripped = edits.without_registry_mirror(current, record.addresses, path) if kept is not None else current
        empty = stripped.strip() in ("", "{}")
    else:
        stripped = edits.without_block(current)
        empty = not stripped.strip()
    ours = stripped != current and (kept is None or kept.before is None)
    return None if ours and empty else stripped


def _carry_out(files: HostFiles, record: Record, wanted: Record, plan: list[_Planned]) -> None:
    """First the record of all files, then the files, then the record without those that are ours no
    longer. When a file cannot be written, the ones before it become what they were."""
    kept = {planned.change.path: planned.kept for planned in plan if planned.kept is not None}
    if all(planned.change.change == "unchanged" for planned in plan) and wanted.runtimes == record.runtimes:
        return
    directories = list(save_record(files, msgspec.structs.replace(wanted, files=record.files | kept)).directories)
    done: list[Change] = []
    try:
        for planned in plan:
            directories += _write(files, planned.change)
            done.append(planned.change)
    except P2PDistError:
        for change in reversed(done):
            _restore(files, change)
        save_record(files, msgspec.structs.replace(record, directories=tuple(directories)))
        raise
    save_record(files, msgspec.structs.replace(wanted, files=kept, directories=tuple(directories)))


def _write(files: HostFiles, change: Change) -> list[str]:
    """Carry out one change; returns the directories that were made for it."""
    if change.change == "unchanged":
        return []
    if change.after is not None:
        return files.write(change.path, change.after)
    files.remove(change.path)
    return []


def _restore(files: HostFiles, change: Change) -> None:
    if change.change == "unchanged":
        return
    if change.before is None:
        files.remove(change.path)
    else:
        files.write(change.path, change.before)
