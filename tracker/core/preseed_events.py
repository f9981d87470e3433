"""What goes into the core of preseeds and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pdist.model.messages import Keep, Kept, Release
from p2pdist.model.preseed import PreseedRecord
from tracker.core.preseed import HostSaid

# -- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """Records as the database has them."""

    records: tuple[PreseedRecord, ...]


@dataclass(frozen=True, slots=True)
class Synced:
    """All that is in the database has been loaded. Ids that are not in `ids` are gone. `said` is
    what the other trackers that live say of their hosts, by tracker and preseed."""

    ids: frozenset[str]
    said: Mapping[str, Mapping[str, dict[str, HostSaid]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A record could not be written; it stays as it was."""

    id: str


@dataclass(frozen=True, slots=True)
class Joined:
    host: str


@dataclass(frozen=True, slots=True)
class Gone:
    host: str


@dataclass(frozen=True, slots=True)
class Said:
    host: str
    kept: Kept


@dataclass(frozen=True, slots=True)
class Tick:
    """Comes often and regularly."""


Event = Loaded | Synced | SaveFailed | Joined | Gone | Said | Tick

# -- commands


@dataclass(frozen=True, slots=True)
class Tell:
    host: str
    message: Keep | Release


@dataclass(frozen=True, slots=True)
class Save:
    """Write the record if the database still has its version."""

    record: PreseedRecord


Command = Tell | Save
