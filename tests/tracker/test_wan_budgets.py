"""Budgets of sites: what they say, what is counted, when imports end and go on, and how a rate is
shared."""

from __future__ import annotations

import tomllib

import pytest
from test_fleet import Control

from p2pdist.model.digest import digest_of
from p2pdist.model.manifest import Reference, parse_reference
from p2pdist.model.messages import PROTOCOL_VERSION, Advance, Assign, Hello, Holding, Report
from p2pdist.model.plan import Plan
from tracker.core.events import Command, Received, Send, SessionOpened, Tick
from tracker.core.member import FROM_ORIGIN
from tracker.core.planning.planner import Planner
from tracker.core.policy.book import PolicyBook
from tracker.core.policy.budget import HOUR_S, Hours, SiteBudget
from tracker.core.policy.table import PolicyTable, read_table
from tracker.core.wan.usage import FREE_SHARE, MINUTE_S, Usage

BLOB = digest_of(b"blob")
MANIFEST = digest_of(b"manifest")
PIECE, PIECES = 65536, 512
HOUR = 3600.0
NIGHT = 23 * HOUR
NOON = 12 * HOUR

# -- what tables say


def table(text: str) -> PolicyTable:
    found, mistakes = read_table(tomllib.loads(text))
    assert mistakes == []
    return found


def mistakes(text: str) -> str:
    return "; ".join(map(str, read_table(tomllib.loads(text))[1]))


def test_a_site_has_a_rate_an_hourly_budget_and_hours() -> None:
    told = table(
        '[[site]]\nname = "west"\nrate = "8Mbit/s"\nhourly = "100GB"\nhours = ["22:00-06:00", "12:00-13:30"]\norigin = "near"'
    )
    hours = Hours(22 * 3600, 6 * 3600), Hours(12 * 3600, 13 * 3600 + 1800)
    assert told.budgets == {"west": SiteBudget("west", 1e6, 100 * 1000**3, hours, counts_origin=False)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name: it is missing"),
        ('name = "we st"\nrate = "1MB/s"', "is the name of no site"),
        ('name = "west"', "it limits nothing"),
        ('name = "west"\nrate = "fast"', "is no rate"),
        ('name = "west"\nhourly = "much"', "is not a size"),
        ('name = "west"\nhours = ["25:00-06:00"]', "'25:00-06:00' is no time of day. Write UTC"),
        ('name = "west"\nhours = ["06:00-06:00"]', "06:00-06:00 has no end"),
        ('name = "west"\nhours = "22:00-06:00"', "is not a list"),
        ('name = "west"\nrate = "1MB/s"\norigin = "here"', "is none of them"),
        ('name = "west"\nrates = "1MB/s"', "there is no such key. Write rate"),
        (
            'name = "west"\nrate = "1MB/s"\n[[site]]\nname = "west"\nrate = "1MB/s"',
            "there is a table for 'west' already",
        ),
    ],
)
def test_every_mistake_is_named(text: str, said: str) -> None:
    assert said in mistakes(f"[[site]]\n{text}")


def test_a_policy_says_whether_its_packages_keep_to_budgets() -> None:
    assert "Write one of keep, ignore-starts, ignore" in mistakes('[[policy]]\nmatch = "a:*"\nbudget = "no"')
    book = PolicyBook(
        table('[[policy]]\nmatch = "job:*"\nbudget = "ignore-starts"\n[[policy]]\nmatch = "fix:*"\nbudget = "ignore"')
    )
    job, fix, other = (digest_of(name) for name in (b"j", b"f", b"o"))
    for name, blob in (("job", job), ("fix", fix), ("other", other)):
        book.note(parse_reference(f"{name}:v1"), digest_of(name.encode() * 2), [blob])
    said = {
        blob: [book.ignores_budget(blob, priority) for priority in ("start", "preseed")] for blob in (job, fix, other)
    }
    assert said == {job: [True, False], fix: [True, True], other: [False, False]}


def test_hours_go_over_midnight() -> None:
    budget = SiteBudget("west", hours=(Hours(22 * 3600, 6 * 3600),))
    assert [budget.open_at(hour * HOUR) for hour in (21.9, 22, 23.5, 24, 29.9, 30, 36)] == [
        False, True, True, True, True, False, False,
    ]  # fmt: skip


# -- usage


def test_an_hour_is_any_hour_and_not_one_of_the_clock() -> None:
    usage, budget = Usage(), SiteBudget("west", hourly_bytes=1000)
    usage.count(400, now=HOUR_S - 10.0)
    usage.count(600, now=HOUR_S + 10.0)
    assert "used its 1 kB of the last hour" in usage.refusal(budget, 1.0, now=HOUR_S + 20.0, utc_s=0.0)
    assert usage.used(now=2 * HOUR_S - MINUTE_S) == 600  # the minute of the first bytes is an hour ago
    assert usage.used(now=2 * HOUR_S) == 0 and usage.total == 1000


def test_a_site_goes_on_once_a_part_of_its_budget_is_free() -> None:
    usage, budget = Usage(), SiteBudget("west", hourly_bytes=1000)
    usage.count(int(1000 * FREE_SHARE / 2), now=0.0)
    usage.count(1000, now=MINUTE_S)
    refused = [bool(usage.refusal(budget, 1.0, now=now, utc_s=0.0)) for now in (MINUTE_S, HOUR_S, HOUR_S + MINUTE_S)]
    assert refused == [True, True, False]


def test_each_tracker_has_its_part_of_the_budget() -> None:
    usage, budget = Usage(), SiteBudget("west", hourly_bytes=900)
    usage.count(299, now=0.0)
    assert not usage.refusal(budget, 1 / 3, now=0.0, utc_s=0.0)
    usage.count(1, now=0.0)
    assert usage.refusal(budget, 1 / 3, now=0.0, utc_s=0.0)


# -- imports


class Sites(Control):
    """Two hosts at the site `east`, which reads the origin, and four at `west`, which has a
    budget."""

    def __init__(
        self, budget: str, policy: str = "", utc_s: float = NIGHT, readers: frozenset[str] = frozenset(["east"])
    ) -> None:
        super().__init__(planner=Planner(origin_sites=readers))
        self.fleet.policies.replace(table(f'[[site]]\nname = "west"\n{budget}\n{policy}'))
        self.utc_s, self.held, self.plans = utc_s, dict[str, str](), dict[str, list[Plan]]()
        self.rates: dict[tuple[str, int], float] = {}
        self.counts: dict[str, list[int]] = {}
        self.pass_s(0.5)  # the first look at the budgets
        for number, site in enumerate(["east", "east", "west", "west", "west", "west"]):
            host = f"{site[0]}{number}"
            self.sessions[host] = number + 1
            self.take(SessionOpened(number + 1, Hello(PROTOCOL_VERSION, host, f"{host}:1", zone="z", site=site)))
            self.join_swarm(host)
        self.pass_s(0.5)

    def join_swarm(self, host: str) -> None:
        stripes = 2
        self.counts[host] = [0] * stripes
        self.take(Received(self.sessions[host], Holding(BLOB, PIECES * PIECE, PIECE, (0,) * stripes)))

    def take(self, event: object) -> None:
        self._take(self.fleet.handle(event, now=self.now))  # type: ignore[arg-type]

    def _take(self, commands: list[Command]) -> list[Command]:
        names = {session: host for host, session in self.sessions.items()}
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Assign):
                host, plan = names[command.session], command.message.plan
                self.plans.setdefault(host, []).append(plan)
                if plan.held is not None:
                    self.held[host] = plan.held
                for choice in plan.stripes:
                    self.rates[host, choice.stripe] = choice.bytes_s
        return commands

    def pass_s(self, seconds: float, step_s: float = 0.1) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now, self.utc_s = self.now + step_s, self.utc_s + step_s
            self.take(Tick(self.utc_s))

    def receive(self, host: str, *pieces: int) -> None:
        self.counts[host] = [old + new for old, new in zip(self.counts[host], pieces, strict=True)]
        self.take(Received(self.sessions[host], Report((Advance(BLOB, tuple(self.counts[host])),))))

    def parent_of(self, host: str, stripe: int) -> str | None:
        return self.fleet.swarms[BLOB].members[host].parents[stripe]

    def importer(self, stripe: int) -> str:
        """The host of west that receives a stripe from east."""
        [found] = [host for host in self.sessions if host[0] == "w" and (self.parent_of(host, stripe) or " ")[0] == "e"]
        return found

    @property
    def crossing(self) -> int:
        """Stripes that come to west from elsewhere."""
        members = self.fleet.swarms[BLOB].members.values()
        parents = [parent for each in members if each.site == "west" for parent in each.parents if parent is not None]
        return sum(parent == FROM_ORIGIN or parent[0] == "e" for parent in parents)


def test_without_a_budget_nothing_is_told_or_counted() -> None:
    sites = Sites('rate = "1GB/s"')
    sites.fleet.policies.replace(PolicyTable())
    sites.pass_s(1.0)
    importer = sites.importer(0)
    sites.receive(importer, 8, 0)
    assert sites.fleet.imports.usage_by_site == {} and not sites.fleet.swarms[BLOB].wan.closed
    assert set(sites.held.values()) == {""}  # told while there was one


def test_what_crosses_the_wan_is_counted_and_nothing_else() -> None:
    sites = Sites('hourly = "1GB"')
    importer = sites.importer(0)
    sites.receive(importer, 8, 0)
    inside = next(host for host in sites.sessions if host[0] == "w" and sites.parent_of(host, 0) == importer)
    sites.receive(inside, 5, 0)
    sites.receive("e0", 20, 20)
    usage = sites.fleet.imports.usage_by_site["west"]
    assert usage.total == 8 * PIECE


def test_a_site_that_has_used_its_budget_waits_and_goes_on_an_hour_later() -> None:
    """Hosts are told why, streams over the WAN end, and those within the site stay."""
    sites = Sites(f'hourly = "{64 * PIECE}"')
    importer = sites.importer(0)
    inside = {
        host: [sites.parent_of(host, stripe) for stripe in range(2)]
        for host in sites.sessions
        if host[0] == "w" and (sites.parent_of(host, 0) or " ")[0] == "w"
    }
    assert sites.crossing == 2 and set(sites.held.values()) <= {""}
    sites.receive(importer, 64, 0)
    sites.pass_s(2.0)
    assert sites.crossing == 0
    assert {host for host, why in sites.held.items() if why} == {host for host in sites.sessions if host[0] == "w"}
    assert "site west waits: it has used its 4.19 MB of the last hour" in sites.held[importer]
    [last] = [choice for choice in sites.plans[importer][-1].stripes if choice.stripe == 0]
    assert last.parent is None
    for host, parents in inside.items():
        assert (sites.parent_of(host, 0) or " ")[0] == "w", parents
    texts = [event.text for event in sites.fleet.history.take() if event.kind == "site"]
    assert len(texts) == 1 and "has to wait: site west waits: it has used its" in texts[0]
    sites.receive(importer, 1, 0)  # the piece that was under way when the stream was to end
    assert sites.fleet.imports.usage_by_site["west"].total == 65 * PIECE
    sites.pass_s(30 * 60, 10.0)
    assert sites.crossing == 0
    sites.pass_s(32 * 60, 10.0)
    assert sites.crossing == 2 and set(sites.held.values()) <= {""}
    assert "comes to site west again" in [event.text for event in sites.fleet.history.take()][-1]


def test_a_site_imports_at_its_hours_alone() -> None:
    sites = Sites('hours = ["22:00-06:00"]', utc_s=NOON)
    assert sites.crossing == 0
    assert all("its WAN is for 22:00-06:00 UTC" in why for host, why in sites.held.items() if host[0] == "w")
    assert sites.parent_of("e0", 0) is not None  # another site does not wait
    sites.utc_s = NIGHT
    sites.pass_s(2.0)
    assert sites.crossing == 2
    sites.utc_s = 24 * HOUR + NOON
    sites.pass_s(2.0)
    assert sites.crossing == 0


def test_a_swarm_at_rest_is_planned_no_more_until_time_helps() -> None:
    sites = Sites('hours = ["22:00-06:00"]', utc_s=NOON)
    for host in ("e0", "e1"):
        sites.receive(host, PIECES // 2, PIECES // 2)
    sites.pass_s(5.0)
    planned_at = sites.fleet.swarms[BLOB].passes.rested_at
    sites.pass_s(60.0)
    assert sites.fleet.swarms[BLOB].passes.rested_at == planned_at
    sites.utc_s = NIGHT
    sites.pass_s(2.0)
    assert sites.crossing == 2


def test_a_late_host_of_a_site_that_waits_is_told_and_receives_what_the_site_has() -> None:
    sites = Sites(f'hourly = "{64 * PIECE}"')
    importer = sites.importer(0)
    sites.receive(importer, 64, 0)
    sites.pass_s(2.0)
    sites.sessions["w9"] = 99
    sites.take(SessionOpened(99, Hello(PROTOCOL_VERSION, "w9", "w9:1", zone="z", site="west")))
    sites.join_swarm("w9")
    sites.pass_s(1.0)
    assert "site west waits" in sites.held["w9"] and sites.crossing == 0


@pytest.mark.parametrize(("budget", "waits"), [("keep", True), ("ignore-starts", False), ("ignore", False)])
def test_a_policy_may_ignore_budgets(budget: str, waits: bool) -> None:
    """What it imports is counted."""
    policy = f'[[policy]]\nmatch = "job:*"\nbudget = "{budget}"'
    sites = Sites('rate = "1MB/s"\nhours = ["22:00-06:00"]', policy, utc_s=NIGHT)
    sites.fleet.policies.note(Reference("job", "v1"), MANIFEST, [BLOB])
    sites.utc_s = NOON
    sites.pass_s(2.0)
    assert (sites.crossing == 0) is waits
    if not waits:
        importer = sites.importer(0)
        sites.receive(importer, 4, 0)
        assert sites.fleet.imports.usage_by_site["west"].total == 4 * PIECE
        assert sites.rates[importer, 0] == 0.0


def test_a_rate_is_shared_by_the_imports_under_way() -> None:
    """Another part is told when a stripe is there."""
    sites = Sites('rate = "8MB/s"')
    first, second = sites.importer(0), sites.importer(1)
    assert sites.rates[first, 0] == sites.rates[second, 1] == 4e6
    assert {rate for (host, _), rate in sites.rates.items() if host[0] == "e"} == {0.0}
    sites.receive(first, PIECES // 2, 0)
    sites.pass_s(6.0)
    assert sites.rates[sites.importer(1), 1] == 8e6


def test_reads_of_the_origin_count_unless_it_is_near() -> None:
    for near in (False, True):
        hours = 'hours = ["22:00-06:00"]' + ('\norigin = "near"' if near else "")
        sites = Sites(hours, utc_s=NOON, readers=frozenset())
        roots = [host for holders in sites.fleet.swarms[BLOB].edges.roots for host in holders]
        assert any(host[0] == "w" for host in roots) is near
        sites.receive(next(host for host in roots if host[0] == "e"), 1, 0)
        assert sites.crossing == (2 if near else 0)


def test_a_budget_that_is_taken_from_the_file_lets_the_site_go_on() -> None:
    sites = Sites('hours = ["22:00-06:00"]', utc_s=NOON)
    assert sites.crossing == 0
    sites.fleet.policies.replace(PolicyTable())
    sites.pass_s(2.0)
    assert sites.crossing == 2 and set(sites.held.values()) == {""}


def test_a_tracker_that_gives_its_blobs_away_ends_nothing() -> None:
    """While it drains it has no share."""
    sites = Sites('rate = "8MB/s"\nhourly = "1GB"')
    rates = dict(sites.rates)
    sites.fleet.imports.fraction = lambda: 0.0
    sites.pass_s(2.0)
    assert sites.crossing == 2 and sites.rates == rates and set(sites.held.values()) <= {""}
