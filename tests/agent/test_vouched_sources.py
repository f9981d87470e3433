"""Which of several repositories a blob is read from, and which of them is blamed for it."""

from __future__ import annotations

import pytest

from p2pdist.agent.pull.vouched_blobs import SOURCES_MAX, WRONG_MAX, Sources, WrongBlobs
from p2pdist.model.digest import Digest, digest_of
from p2pdist.model.errors import Corrupt, NotFound, P2PDistError

BLOB = digest_of(b"a blob")


class Repository:
    """Gives its own name, or fails."""

    def __init__(self, repository: str, *failures: P2PDistError | None) -> None:
        self.repository, self._failures = repository, list(failures)

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        return self.repository.encode()


async def test_what_is_asked_for_later_changes_nothing_for_a_pull_that_runs() -> None:
    sources = Sources()
    sources.add(Repository("honest"))
    assert await sources.read_range(BLOB, 0, 1) == b"honest"
    sources.add(Repository("evil"))
    assert await sources.read_range(BLOB, 1, 1) == b"honest"
    assert sources.suspects == {"honest"} and sources.repositories == {"honest", "evil"}


async def test_one_that_refuses_comes_last_and_the_last_one_asked_for_is_always_tried() -> None:
    sources = Sources()
    for number in range(SOURCES_MAX):
        sources.add(Repository(f"lacks{number}", *[NotFound("no such blob")] * 3))
    sources.add(Repository("has"))
    assert len(sources.repositories) == SOURCES_MAX
    assert await sources.read_range(BLOB, 0, 1) == b"has"
    assert sources.suspects == {"has"}
    with pytest.raises(NotFound):
        lone = Sources()
        lone.add(Repository("lacks", NotFound("no such blob")))
        await lone.read_range(BLOB, 0, 1)


async def test_of_several_that_gave_bytes_those_that_did_not_give_all_are_blamed() -> None:
    sources = Sources()
    sources.add(Repository("evil", None, NotFound("no more")))
    sources.add(Repository("honest"))
    assert [await sources.read_range(BLOB, start, 1) for start in range(2)] == [b"evil", b"honest"]
    assert sources.suspects == {"evil"}


async def test_one_that_gives_no_range_is_blamed() -> None:
    sources = Sources()
    sources.add(Repository("short", Corrupt("too few bytes")))
    with pytest.raises(Corrupt):
        await sources.read_range(BLOB, 0, 1)
    assert sources.suspects == {"short"}


async def test_a_wrong_blob_counts_for_its_repository_and_size_and_a_while() -> None:
    wrong = WrongBlobs()
    wrong.note(["evil/app"], BLOB, 10, "other bytes", 600.0)
    with pytest.raises(Corrupt, match="evil/app gave something else: other bytes"):
        wrong.require_right("evil/app", BLOB, 10)
    wrong.require_right("team/app", BLOB, 10)
    wrong.require_right("evil/app", BLOB, 11)
    wrong.require_right("evil/app", digest_of(b"another"), 10)
    wrong.note(["evil/app"], BLOB, 10, "other bytes", 0.0)
    wrong.require_right("evil/app", BLOB, 10)
    wrong.note([f"r{number}" for number in range(WRONG_MAX + 1)], BLOB, 10, "other bytes", 600.0)
    wrong.require_right("r0", BLOB, 10)
    with pytest.raises(Corrupt):
        wrong.require_right(f"r{WRONG_MAX}", BLOB, 10)
