"""What waits to be said to a tracker, in as few messages as will do.

A package of hundreds of small blobs is hundreds of joins and as many completions within a second:
said one by one they would cost the tracker as many messages and passes. What was said about one
blob stays in order, and so does everything else.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdist.model.digest import Digest
from p2pdist.model.messages import BLOBS_PER_MESSAGE_MAX, Advance, FromAgent, Holding, Holdings, Report


def gathered(messages: Iterable[FromAgent]) -> list[FromAgent]:
    """The same in fewer messages: holdings of several blobs become one, and then the reports of
    that time one."""
    run = _Run()
    for message in messages:
        run.add(message)
    run.end()
    return run.said


class _Run:
    """Holdings that can go into one message, and reports that can follow in another. A holding
    states more than all that was said of its blob before, an advance more than the advances
    before."""

    def __init__(self) -> None:
        self.said: list[FromAgent] = []
        self._holdings: dict[Digest, Holding] = {}
        self._advances: dict[Digest, Advance] = {}
        self._reports: list[Report] = []

    def add(self, message: FromAgent) -> None:
        match message:
            case Holding(blob):
                if blob in self._advances or len(self._holdings) >= BLOBS_PER_MESSAGE_MAX:
                    self.end()
                self._holdings[blob] = message
            case Report(blobs):
                if len(self._advances) + len(blobs) > BLOBS_PER_MESSAGE_MAX:
                    self.end()
                self._advances.update((advance.blob, advance) for advance in blobs)
                self._reports.append(message)
            case _:
                self.end()
                self.said.append(message)

    def end(self) -> None:
        """What follows goes into other messages."""
        holdings, reports = tuple(self._holdings.values()), self._reports
        if holdings:
            self.said.append(Holdings(holdings) if len(holdings) > 1 else holdings[0])
        if reports:
            sent_bytes, busy_s = sum(each.sent_bytes for each in reports), sum(each.busy_s for each in reports)
            self.said.append(Report(tuple(self._advances.values()), sent_bytes, busy_s))
        self._holdings, self._advances, self._reports = {}, {}, []
