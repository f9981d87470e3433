"""The upstreams of an agent: those that it was given, and those that its tracker names; and what it
asks its tracker of them.

An agent needs no accounts of its own: for each repository that it reads blobs of the tracker gives
it a token that is valid for a few minutes. Where the tracker has none, as for registries that take
a user and a password alone, and while no tracker answers, the agent goes by Docker's config.json of
its own user.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import msgspec

from p2pdist.agent.tracker.attention import answer_unless_silent
from p2pdist.agent.tracker.session import TrackerSession
from p2pdist.model.digest import Digest, digest_of, is_digest
from p2pdist.model.errors import UNDECODABLE, Corrupt, NotFound, P2PDistError, Unavailable, UsageError
from p2pdist.model.image import ImageName, image_name
from p2pdist.model.image_manifest import ImageDocument, TagPage, clean_media_type, decode_image
from p2pdist.model.policy import NO_POLICY, POLICY_HEADER, PackagePolicy, decode_policy
from p2pdist.model.upstream import UPSTREAMS_MAX, Upstream, UpstreamSettings, parse_redirects, unique, upstream_of
from p2pdist.origin.registry.authentication import PullToken
from p2pdist.origin.registry.upstream import UpstreamRegistry, UpstreamRepository

LEARN_S = 5.0
"""Between two questions to a tracker which upstreams there are, while an unknown one is asked
for."""

LEARN_AGAIN_S = 60.0
"""A tracker may go by other settings meanwhile."""

TOKEN_WAIT_S = 5.0
POLICIES_MAX = 1000

logger = logging.getLogger(__name__)
Document = TypeVar("Document")
Value = TypeVar("Value")


class _Tags(msgspec.Struct):
    tags: tuple[str, ...]
    more: bool


class _Size(msgspec.Struct):
    size: int


class _Token(msgspec.Struct):
    token: str
    lasts_s: float


class TrackedImages:
    """What a tracker knows of images. Every method raises what the tracker answers: NotFound,
    Refused, Corrupt, Unavailable."""

    def __init__(self, session: TrackerSession) -> None:
        self._session = session
        self._policies: OrderedDict[Digest, PackagePolicy] = OrderedDict()
        """What trackers stated last of a manifest, by its digest."""

    def policy(self, manifest: Digest) -> PackagePolicy:
        """The policy that a tracker stated last of a manifest."""
        return self._policies.get(manifest, NO_POLICY)

    @property
    def connected(self) -> bool:
        """Whether a tracker answers."""
        return self._session.connected

    @property
    def answers(self) -> bool:
        """Whether a tracker is connected, and did not leave the last question whether it works
        without an answer."""
        return self._session.attention.answers

    async def ask(self, question: Callable[[], Awaitable[Value]], wait_s: float | None = None) -> Value:
        """What the tracker answers, for a caller that can go on without it. Raises Unavailable too
        where that takes longer than `wait_s`, and soon where the tracker hangs."""
        return await answer_unless_silent(self._session, question, wait_s)

    async def upstreams(self) -> tuple[UpstreamSettings, ...]:
        """The upstreams of the fleet."""
        listed = _decoded(await self._session.get("/v1/upstreams", {}), list[Upstream])
        try:
            return unique(tuple(map(_settings_of, listed[:UPSTREAMS_MAX])))
        except UsageError as error:
            raise Corrupt(f"the tracker names an upstream that is none: {error.what}") from error

    async def manifest(self, name: ImageName, target: str, known: Digest | None = None) -> ImageDocument | None:
        """The manifest or index that a tag or digest names, verified; None where that is
        `known`."""
        headers = {"If-None-Match": f'"{known}"'} if known is not None else {}
        path, place = f"{_path(name)}/manifests/{target}", self._session.place
        status, body, answered = await self._session.exchange(path, place, headers)
        digest = known if status == 304 and known is not None else digest_of(body)
        if is_digest(target) and digest != target:
            raise Corrupt(f"the tracker sent something else for {target}")
        self._policies[digest] = decode_policy(answered.get(POLICY_HEADER, "{}"))
        while len(self._policies) > POLICIES_MAX:
            self._policies.popitem(last=False)
        if status == 304:
            return None
        media_type = clean_media_type(answered.get("Content-Type", ""))
        return ImageDocument(body, decode_image(body, media_type).media_type, digest)

    async def tags(self, name: ImageName, n: int, last: str) -> TagPage:
        """Some tags of a repository."""
        query = {"n": str(n), **({"last": last} if last else {})}
        found = _decoded(await self._session.get(f"{_path(name)}/tags", query), _Tags)
        return TagPage(found.tags, found.more)

    async def referrers(self, name: ImageName, digest: Digest, artifact_type: str) -> ImageDocument:
        """The index of what refers to a manifest."""
        query = {"artifactType": artifact_type} if artifact_type else {}
        body = await self._session.get(f"{_path(name)}/referrers/{digest}", query)
        return ImageDocument(body, decode_image(body).media_type, digest_of(body))

    async def blob_size(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob."""
        return _decoded(await self._session.get(f"{_path(name)}/blobs/{digest}", {}), _Size).size

    async def confirmed(self, name: ImageName, digest: Digest) -> int:
        """The size of a blob that the registry has in this repository, whatever manifests name."""
        path = f"{_path(name)}/blobs/{digest}"
        return _decoded(await self._session.get(path, {"confirm": "1"}), _Size).size

    async def token(self, name: ImageName) -> PullToken:
        """What lets this host read the blobs of a repository."""
        found = _decoded(await self._session.get(f"{_path(name)}/token", {}), _Token)
        return PullToken(found.token, found.lasts_s)


class UpstreamRegistries:
    """The registries that an agent may read. `own` are those of its settings. On the event loop."""

    def __init__(self, own: tuple[UpstreamSettings, ...], tracked: TrackedImages) -> None:
        self._own = {upstream.name: upstream for upstream in own}
        self._learned: dict[str, UpstreamSettings] = {}
        """By name, of the tracker that answered last."""
        self._tracked = tracked
        self._registries: dict[str, UpstreamRegistry] = {}
        self._asked_at = -LEARN_S
        self._learning: asyncio.Task[None] | None = None

    @property
    def known(self) -> tuple[UpstreamSettings, ...]:
        """The upstreams whose images may be asked for here."""
        return tuple({**self._learned, **self._own}.values())

    def is_own(self, name: ImageName) -> bool:
        """Whether this agent was given the upstream, and asks it itself while no tracker
        answers."""
        return name.upstream in self._own

    def is_learned(self, name: ImageName) -> bool:
        """Whether the tracker named the upstream, and answers for it."""
        return name.upstream in self._learned

    def begin_learning(self) -> None:
        """A tracker begins to answer: ask it for its upstreams."""
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._learn(), name="learn-upstreams")

    async def require(self, name: ImageName) -> None:
        """Raises NotFound for an upstream that neither this agent nor its tracker was given."""
        now = asyncio.get_running_loop().time()
        if name.upstream in self._own or name.upstream in self._learned:
            if self._tracked.connected and now - self._asked_at >= LEARN_AGAIN_S:
                self.begin_learning()
            return
        if self._learning is not None and not self._learning.done():
            await asyncio.wait([self._learning])
        elif self._tracked.connected and now - self._asked_at >= LEARN_S:
            self.begin_learning()
            assert self._learning is not None
            await asyncio.wait([self._learning])
        if name.upstream not in self._learned:
            raise NotFound(
                f"{name.upstream} is no upstream here",
                remedy=f"Start the tracker, or this agent, with --upstream {name.upstream}",
            )

    async def _learn(self) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        try:
            learned = {upstream.name: upstream for upstream in await self._tracked.upstreams()}
        except P2PDistError as error:  # NotFound: a tracker of an earlier version
            logger.debug("the tracker names no upstreams: %s", error)
            return
        for name, upstream in learned.items():
            if name in self._registries and name not in self._own and self._learned.get(name) != upstream:
                await self._registries.pop(name).close()
        self._learned = learned

    def reader(self, name: ImageName) -> UpstreamRepository:
        """The repository at its registry. Raises NotFound for an unknown upstream."""
        registry = self._registries.get(name.upstream)
        if registry is None:
            settings = self._own.get(name.upstream) or self._learned.get(name.upstream)
            if settings is None:
                raise NotFound(f"{name.upstream} is no upstream here")
            source = partial(self._token, name.upstream)
            registry = self._registries[name.upstream] = UpstreamRegistry(settings, source=source)
        return registry.repository(name.repository)

    def source(self, name: ImageName) -> UpstreamBlobs:
        """The blobs of a repository, whether or not the upstream is known yet."""
        return UpstreamBlobs(self, name)

    async def _token(self, upstream: str, scope: str) -> PullToken | None:
        """The token for a scope from the tracker; None where there is none."""
        if not self._tracked.connected or upstream not in self._learned:
            return None
        try:
            name = image_name(upstream, scope.split(":")[1])
            return await self._tracked.ask(lambda: self._tracked.token(name), TOKEN_WAIT_S)
        except P2PDistError as error:
            logger.info("the tracker gives no token for %s: %s", upstream, error)
            return None

    async def close(self) -> None:
        """End all connections."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        for registry in self._registries.values():
            await registry.close()


def _settings_of(stated: Upstream) -> UpstreamSettings:
    """How an agent uses an upstream that its tracker names. Raises UsageError."""
    found = upstream_of(stated.name, stated.url)
    return msgspec.structs.replace(found, redirects=parse_redirects(stated.redirects))


class UpstreamBlobs:
    """The blobs of one repository, to be read from its registry where no other host gives them. An
    agent that no tracker has named the upstream to has what its store and its peers have."""

    def __init__(self, registries: UpstreamRegistries, name: ImageName) -> None:
        self._registries, self._name = registries, name
        self._repository: UpstreamRepository | None = None
        """What was read from last: its readers find out together whether there are ranges."""

    @property
    def repository(self) -> str:
        """The name of the repository, with that of its registry."""
        return str(self._name)

    def __eq__(self, other: object) -> bool:
        """Whether the other one reads the same repository."""
        return isinstance(other, UpstreamBlobs) and (self._registries, self._name) == (other._registries, other._name)

    def __hash__(self) -> int:
        return hash((self._registries, self._name))

    async def read_range(self, digest: Digest, start: int, length: int) -> bytes:
        """`length` bytes of a blob. Raises P2PDistError; Unavailable for an unknown upstream, which
        says nothing of its blobs."""
        try:
            await self._registries.require(self._name)
        except NotFound as error:
            raise Unavailable(error.what, remedy=error.remedy) from error
        repository = self._registries.reader(self._name)
        if self._repository != repository:  # the first one, or the tracker has named another URL
            self._repository = repository
        return await self._repository.read_range(digest, start, length)


def _path(name: ImageName) -> str:
    """The path of an image at a tracker. The slashes of a repository are encoded, so that its name
    looks like no other path."""
    return f"/v1/images/{quote(name.upstream, safe=':[]')}/{quote(name.repository, safe='')}"


def _decoded(data: bytes, kind: type[Document]) -> Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Corrupt(f"the tracker sent something else than was asked for: {error}") from error
