"""Keep-warm: hosts always hold what a tag means, asked for or not.

Theory. For each meaning of a tag there is one preseed, an order. Its name follows from what is kept
warm, at which hosts, and the manifest that the tag means, so that a tracker that was started again,
and each of several trackers of one fleet with the same policies, arrive at the same order. When the
tag moves the new order is given and the old one cancelled at once: what it held stays in the stores
until room is needed, and both need not fit. An order that another process ended is given anew under
the next number, after a rest that is longer each time: it may have been another tracker, which
asked later what the tag means or has other policies, and the two must not undo each other's orders
without end. While the meaning of a tag cannot be found out, its order stays.

Invariant: only preseeds with names such as these are touched: PREFIX, 16 hexadecimal digits for
what is kept warm and where, 16 of the manifest's digest, and a number from 2 on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from p2pdist.model.digest import Digest, hex_of
from p2pdist.model.errors import P2PDistError
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.preseed import COUNT_MAX, PreseedRequest
from p2pdist.model.units import parse_duration
from tracker.core.policy.rules import Rule
from tracker.core.policy.section import Section
from tracker.core.preseeds.selectors import parse_selector

PREFIX = "warm-"
TAGS_MAX = 64
EVERY_S = 60.0
EVERY_S_MIN, EVERY_S_MAX = 1.0, 86400.0
REST_S, REST_S_MAX = 3.0, 3600.0
"""Before an order is given anew: the first time, doubled each time, at most. Longer than another
tracker takes to hear of a change."""

EXAMPLE = '[policy.warm] with count = 10 or selector = "zone=eu-1"'

_ours = re.compile(rf"({PREFIX}[0-9a-f]{{16}})-[0-9a-f]{{16}}(?:-([1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True)
class Warm(Rule):
    """`[policy.warm]` with `selector`, `count` or both, `tags` (without them the one tag that the
    pattern is), and `every`: how often, in seconds here, the origin is asked what they mean."""

    tags: tuple[str, ...] = ()
    selector: str | None = None
    count: int | None = None
    every_s: float = EVERY_S

    @classmethod
    def read(cls, section: Section) -> Self:
        """See Rule; `match` stands for the tag where it is one."""
        warm = section.table("warm", EXAMPLE)
        if warm is None:
            return cls()
        tags = warm.texts("tags", TAGS_MAX, '["team/trainer:prod"]')
        match = section.raw("match")
        if not warm.has("tags"):
            if isinstance(match, str) and not any(mark in match for mark in "*?["):
                tags = (match,)
            else:
                warm.wrong("tags", "it does not say which", f'Write tags = ["team/trainer:prod"] ({match!r} is many)')
        for tag in tags or ():
            _check_tag(tag, warm)
        selector, count = warm.text("selector", 'Write it like "zone=eu-1,rack=r1"'), warm.number("count", 1, COUNT_MAX)
        if selector is not None:
            try:
                parse_selector(selector)
            except P2PDistError as error:
                warm.wrong("selector", error.what, error.remedy)
        if not warm.has("selector") and not warm.has("count"):
            warm.wrong("count", "it does not say on which hosts", 'Write count = 10, or selector = "zone=eu-1"')
        every_s = warm.parsed("every", parse_duration, "60s")
        if every_s is not None and not EVERY_S_MIN <= every_s <= EVERY_S_MAX:
            warm.wrong("every", f"{every_s:g} s is not from 1 s to 1 d", 'Write every = "60s"')
        warm.end()
        return cls(tags or (), selector, count, every_s or EVERY_S)


def _check_tag(tag: str, warm: Section) -> None:
    try:
        reference = parse_reference(tag)
    except P2PDistError as error:
        warm.wrong("tags", error.what, error.remedy)
        return
    if reference.digest is not None or str(reference) != tag:
        warm.wrong(
            "tags", f"{tag[:80]!r} is no tag", "A digest never moves: order a preseed of it. A tag reads name:tag"
        )


def stem(warm: Warm, tag: str) -> str:
    """The part of an order's name that says what is kept warm, and at which hosts."""
    said = f"{tag} {warm.selector or ''} {warm.count or ''}"
    return PREFIX + blake2b(said.encode(), digest_size=8).hexdigest()


def stem_of(name: str) -> str:
    """The stem of an order's name, "" for any other preseed."""
    found = _ours.fullmatch(name)
    return found[1] if found else ""


def rest_s(name: str) -> float:
    """How long after this order ended another may be given in its place."""
    found = _ours.fullmatch(name)
    return min(REST_S_MAX, REST_S * 2.0 ** min(30, int((found and found[2]) or 1) - 1))


@dataclass(frozen=True)
class Changes:
    """Preseeds to order and ids of those to cancel; `doubtful` are tags of which another tracker
    may know better what they mean."""

    order: tuple[PreseedRequest, ...]
    cancel: tuple[str, ...]
    doubtful: tuple[str, ...]


def changes(
    warms: Iterable[Warm], meanings: Mapping[str, Digest], live: Mapping[str, bool], resting: Collection[str] = ()
) -> Changes:
    """What is to be done so that what `meanings` says of tags is kept warm, and nothing else.
    `live`: the preseeds that are known by id, and whether they go on; `resting`: those that ended a
    moment ago."""
    order: list[PreseedRequest] = []
    kept: dict[str, str | None] = {}
    tags: dict[str, str] = {}
    anew: list[str] = []
    for warm in warms:
        for tag in warm.tags:
            begin, digest = stem(warm, tag), meanings.get(tag)
            tags[begin], kept[begin] = tag, None
            if digest is None:
                continue
            name, before = _name(f"{begin}-{hex_of(digest)[:16]}", live)
            if before in resting:
                continue
            kept[begin] = name
            if name not in live:
                package = str(Reference(parse_reference(tag).name, digest=digest))
                order.append(PreseedRequest(package, name, selector=warm.selector, count=warm.count))
                anew += [tag] if before else []
    ours = [name for name, goes_on in live.items() if goes_on and stem_of(name)]
    cancel = [name for name in ours if not _stays(name, kept)]
    rivals = [tags[begin] for begin in map(stem_of, cancel) if begin in tags]
    return Changes(tuple(order), tuple(cancel), tuple(dict.fromkeys([*anew, *rivals])))


def _name(begin: str, live: Mapping[str, bool]) -> tuple[str, str]:
    """The name of the order that goes on, else the first that is free; and the one before, "" if
    there was none."""
    number, name, before = 1, begin, ""
    while live.get(name) is False:
        number += 1
        name, before = f"{begin}-{number}", name
    return name, before


def _stays(name: str, kept: Mapping[str, str | None]) -> bool:
    begin = stem_of(name)
    return begin in kept and kept[begin] in (None, name)
