"""The messages on the wire: of an agent's session with a tracker, of stripe streams, and of the
agent's local API.

A session is one WebSocket (`/v1/session`) carrying one JSON document per text frame, told apart by
its `type` field.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from p2pdist.model.digest import Digest, WireDigest
from p2pdist.model.errors import UNDECODABLE, UsageError
from p2pdist.model.ownership import OPTIONAL_TRACKER_ID, Epoch, Ownership
from p2pdist.model.plan import STRIPES_MAX, TICKET_CHARACTERS_MAX, Address, HostName, Plan, StripeNumber

PROTOCOL_VERSION = 1
MESSAGE_BYTES_MAX = 4 << 20
BLOBS_PER_MESSAGE_MAX = 1000

COUNT_MAX = 1 << 62
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
"""Bytes or pieces: decoding refuses negative and absurd numbers."""

Counts = Annotated[tuple[Count, ...], Meta(max_length=STRIPES_MAX)]

Reason = Literal[
    "refused", "reset", "short", "stalled", "slow", "corrupt", "protocol", "missing", "busy", "unavailable"
]
"""Why a host complains of a source: it refused the connection; broke it; ended early; sent nothing;
sent far less than the sources of other stripes; sent wrong bytes; broke the protocol; lacks the
blob; is over its limits; the origin did not answer."""

Priority = Literal["start", "preseed"]
"""start: a user or a job waits for this pull. preseed: it gives way to starts."""

PRESEED_ID = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
PreseedId = Annotated[str, Meta(pattern=PRESEED_ID)]
KeptState = Literal["waiting", "pulling", "done", "failed"]
TicketText = Annotated[str, Meta(max_length=TICKET_CHARACTERS_MAX)]
LISTED_MAX = 4096
"""Pieces of one message about a vouched list."""

ListedPieces = Annotated[tuple[Count, ...], Meta(max_length=LISTED_MAX)]
ListedHashes = Annotated[bytes, Meta(max_length=LISTED_MAX * 32)]
REASON_CHARACTERS_MAX = 500
DRAIN_S_MAX = 86400.0
MOUNTED_MAX = 32
EvictionId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
CHOSEN_BYTES_MAX = 8192
AUTHORITIES_BYTES_MAX = 1 << 16
"""Of the certificates of all authorities that agents are told."""


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of all session messages."""


# -- agent to tracker


class Hello(Message, frozen=True):
    """Opens a session. Other agents reach this one at `address` (host:port). No name may hold white
    space. `upload_bytes_s` and `download_bytes_s` are the host's configured limits, 0 for none;
    `bt_port` is its BitTorrent port, 0 for none. `tls`: it speaks TLS with other agents. `instance`
    names the running agent, so that the tracker recognises it after its address has changed; it is
    a secret between the two (`instance_proof`). `platform` is what images the host runs, such as
    linux/amd64/v3. `site` is where the host's zone is: zones of one name at two sites are two, and
    a zone that names no site is one by itself. `partial`: the host has its home session with
    another tracker of the fleet, and speaks in this one of the blobs alone that this tracker
    owns. `time` is the host's clock, in seconds since the epoch, and `version` that of its agent; 0
    and empty from agents that do not send them."""

    protocol: int
    host: Annotated[HostName, Meta(min_length=1)]
    address: Annotated[Address, Meta(min_length=1)]
    zone: HostName = ""
    rack: HostName = ""
    upload_bytes_s: Annotated[float, Meta(ge=0)] = 0.0
    bt_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    tls: bool = False
    instance: Annotated[str, Meta(max_length=64)] = ""
    download_bytes_s: Annotated[float, Meta(ge=0)] = 0.0
    platform: Annotated[str, Meta(max_length=64)] = ""
    site: HostName = ""
    partial: bool = False
    time: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    version: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9.+_-]{0,32}\Z")] = ""


class Selected(msgspec.Struct, frozen=True, array_like=True):
    """What a selection was selected from (model/selection.py): the blob, its piece list, and the
    bitmap of the chosen pieces."""

    blob: WireDigest
    pieces: WireDigest
    chosen: Annotated[bytes, Meta(max_length=CHOSEN_BYTES_MAX)]


NONCE_PATTERN = r"[0-9a-f]{32}"
"""What GET /healthz of an agent takes as `nonce`."""


def instance_proof(instance: str, host: str, nonce: str) -> str:
    """What the agent with this `Hello.instance` answers to a nonce: only it and the tracker that
    heard its hello can tell, and the answer does not give the instance away."""
    return blake2b(f"{instance} {host} {nonce}".encode(errors="replace"), digest_size=16).hexdigest()


class Holding(Message, frozen=True):
    """The host holds or pulls this blob. `counts` is the number of verified pieces per stripe;
    `parents` names, per stripe, the host it receives from (`""` the origin, None no host). `swarm`:
    it receives by BitTorrent, and parents say little. Sent to join a swarm, when the priority rises
    or the transport changes and, after a new session opens, to rebuild the tracker's view. `ticket`
    is the last one that the host got for the blob: it shows a tracker that has just started that
    the host may receive it. `selected` says, while access is on, which blob a selection is of.
    `vouched`: the host has no piece list but the vouched one (model/vouched_list.py); `matched`:
    the SHA-256 of the whole has matched the digest here, so that the host needs no list now."""

    blob: WireDigest
    size: Count
    piece_size: Count
    counts: Counts
    parents: Annotated[tuple[HostName | None, ...], Meta(max_length=STRIPES_MAX)] = ()
    priority: Priority = "start"
    swarm: bool = False
    ticket: TicketText = ""
    selected: Selected | None = None
    vouched: bool = False
    matched: bool = False


class Holdings(Message, frozen=True):
    """Several holdings in one message, at most BLOBS_PER_MESSAGE_MAX."""

    blobs: Annotated[tuple[Holding, ...], Meta(max_length=BLOBS_PER_MESSAGE_MAX)]


class EpochSeen(Message, frozen=True):
    """The host has heard of an ownership of this epoch, which is newer than what this tracker told
    it. Sent only to a tracker that told one."""

    epoch: Epoch


class Advance(msgspec.Struct, frozen=True, array_like=True):
    """New piece counts per stripe of one blob. `origin_bytes` is what this pull has read of the
    origin so far; None from agents that do not say so. `yields`: the pull is a preseed, and held
    back since the last report for what readers or starts at its host wait for. It is sent then
    although the counts are the same."""

    blob: WireDigest
    counts: Counts
    origin_bytes: Count | None = None
    yields: bool = False


class Report(Message, frozen=True):
    """Progress since the last report. `sent_bytes` over `busy_s` (seconds in which some stream had
    data waiting) is the host's upload capacity."""

    blobs: Annotated[tuple[Advance, ...], Meta(max_length=BLOBS_PER_MESSAGE_MAX)] = ()
    sent_bytes: Count = 0
    busy_s: Annotated[float, Meta(ge=0)] = 0.0


class Complaint(Message, frozen=True):
    """A source failed this host in one stripe. `source` is a host name, or "" for the origin.
    `nameless`: the source could not be reached because this host's name servers do not answer, so
    that it cannot reach any host whose address is a name. `starved`: nothing of the stripe has come
    yet from any source, though this one had the time to send; with the reason `slow`, for it is too
    early to say that the source is at fault. `waits`: beside that, the source said that it had no
    piece to send."""

    blob: WireDigest
    stripe: StripeNumber
    source: HostName
    reason: Reason
    piece: Count | None = None
    nameless: bool = False
    starved: bool = False
    waits: bool = False


Basis = Literal["read", "whole", "told"]
"""How a host knows the hashes of pieces: it has read the pieces from upstream itself; it has the
whole blob, whose SHA-256 matched; it was told them by a tracker or a peer."""


class Vouched(Message, frozen=True):
    """The host states the hashes of these pieces: `hashes` is the BLAKE3 of each, 32 bytes a piece,
    in the order of `pieces`. `round` is that of the list as the host knows it. Sent for what the
    host has just read, after each welcome for what it has read of blobs that are not complete, and
    to answer Recall. `basis` says how it knows; for what it was told, no host is to blame."""

    blob: WireDigest
    round: Count
    pieces: ListedPieces
    hashes: ListedHashes
    basis: Basis = "read"


class Judged(Message, frozen=True):
    """The host has all pieces as the vouched list of this round has them, and the SHA-256 of the
    whole `matches` the blob's digest, or not."""

    blob: WireDigest
    round: Count
    matches: bool


class Left(Message, frozen=True):
    """The host neither holds nor pulls the blob any more."""

    blob: WireDigest


class Leaving(Message, frozen=True):
    """The host drains. It serves its children until they have other parents, for a bounded time,
    and fetches nothing more. Valid for the session: a new session takes it back."""


class Kept(Message, frozen=True):
    """The host's progress with a preseed. Sent when `state` changes, now and then while it pulls,
    and for every preseed that it keeps when a new session opens: `waiting` then means that it holds
    pins and does not know yet for which package. Bytes are the layers' bytes; `reason` of a failure
    is the slug of its problem, a colon and what happened, and while it pulls what it waits for.
    `package` is the one that it was asked to keep, as `Keep` named it, empty where it does not say:
    an order under an id that was used before may be of another."""

    id: PreseedId
    state: KeptState
    bytes_done: Count = 0
    bytes_total: Count = 0
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)] = ""
    package: Annotated[str, Meta(max_length=512)] = ""


class PullFailed(Message, frozen=True):
    """A pull of this host has failed, `age_s` ago: of a package or image by reference, or of a blob
    by digest. `digest` is the package's manifest, where it is known; `reason` is the slug of its
    problem, a colon and what happened. Sent to the home, and only to a tracker whose welcome says
    that it takes `failures`."""

    reference: Annotated[str, Meta(min_length=1, max_length=512)]
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)]
    digest: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")] = ""
    age_s: Annotated[float, Meta(ge=0)] = 0.0


class Condition(Message, frozen=True):
    """How the host does, for people: the `version` of its agent; the bytes of its store and their
    limit, null where the disk alone limits it; the free bytes of its disk; how many views it shows,
    and the packages of the first MOUNTED_MAX of them. Sent to the home when a session opens and
    when it has changed, and only to a tracker whose welcome says that it takes `conditions`. A host
    that sends it takes Evict."""

    version: Annotated[str, Meta(max_length=64)]
    store_bytes: Count
    capacity_bytes: Count | None
    disk_free_bytes: Count
    mounts: Count = 0
    mounted: Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=MOUNTED_MAX)] = ()


class Evicted(Message, frozen=True):
    """Answers Evict: the package has left the store, or `problem` is the slug of why it stays
    (`not-found`: it was not here), and `reason` what happened."""

    id: EvictionId
    bytes_freed: Count = 0
    problem: Annotated[str, Meta(max_length=64)] = ""
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)] = ""


class Spares(Message, frozen=True):
    """The host's redundant packs: blobs that it need not fetch for any package, held or not, since
    complete trees of its store have their contents. Sent when a session opens and when they change;
    replaces the former list, or with `more` adds to it."""

    blobs: Annotated[tuple[WireDigest, ...], Meta(max_length=BLOBS_PER_MESSAGE_MAX)]
    more: bool = False


# -- tracker to agent


class Welcome(Message, frozen=True):
    """Answers Hello: how often to report, and the origin's URL (empty when agents have their own),
    without credentials: any process that reaches a tracker may open a session. `time` is the
    tracker's clock, in seconds since the epoch; 0 from trackers that do not send it. `ownership`:
    this is the tracker with the id `tracker` of several; absent where there is one tracker.
    `failures`: the tracker takes PullFailed; `conditions`: it takes Condition."""

    protocol: int
    report_interval_s: float
    origin: str = ""
    time: Annotated[float, Meta(ge=0)] = 0.0
    ownership: Ownership | None = None
    tracker: Annotated[str, Meta(pattern=OPTIONAL_TRACKER_ID)] = ""
    failures: bool = False
    conditions: bool = False


class OwnershipChanged(Message, frozen=True):
    """A new ownership counts from now on. The host tells each new owner what it holds of its blobs,
    and goes on with its streams."""

    ownership: Ownership


class NotOwner(Message, frozen=True):
    """Another tracker owns these blobs, of which the host spoke to this one, or which this one gave
    away: the host tells that tracker what it holds of them. Without an `ownership` the one counts
    that was told last in this session."""

    blobs: Annotated[tuple[WireDigest, ...], Meta(max_length=BLOBS_PER_MESSAGE_MAX)]
    ownership: Ownership | None = None


class Pace(Message, frozen=True):
    """How often to report from now on: the fleet has grown or shrunk."""

    report_interval_s: float


class OriginShare(Message, frozen=True):
    """How many bytes a second the host may read from the origin, in all stripes together: its share
    of the limit for all hosts. `ended`: it holds no lease of this tracker any more, and this share,
    of which it was told, is others' again; agents that do not know that keep it."""

    bytes_s: Annotated[float, Meta(gt=0)]
    ended: bool = False


class Assign(Message, frozen=True):
    """A plan for one blob. `ticket` lets the host receive it from other agents (model/access.py);
    empty while access is off."""

    plan: Plan
    ticket: TicketText = ""


class Listed(Message, frozen=True):
    """More of a vouched piece list: `hashes` is the BLAKE3 of each of `pieces`, 32 bytes a piece. A
    higher `round` than before begins a new round, perhaps without any pieces yet. Rounds are
    counted by session: after a welcome they begin at 0 again, and the tracker sends the list as
    far as it is."""

    blob: WireDigest
    round: Count
    pieces: ListedPieces
    hashes: ListedHashes


class Reread(Message, frozen=True):
    """The host is the arbiter of this round: it reads every piece of the blob from upstream again,
    what it holds included, and vouches for each."""

    blob: WireDigest
    round: Count


class Recall(Message, frozen=True):
    """The tracker lacks hashes of the vouched list of this blob, as after a new start: the host
    answers with all that it knows (`Vouched`)."""

    blob: WireDigest


class Access(Message, frozen=True):
    """What an agent needs to judge others while access is on. Sent after the welcome and when any
    of it changes; replaces what was sent before. `keys`: public halves of the keys that sign
    tickets, base64 by name. `authorities`: certificates, PEM, of which a peer's must come.
    `revoked`: `host:NAME`, `token:ID` and `join:ID`. `public`: patterns of packages for which no
    ticket is needed. `local`: patterns of packages by `user:NAME` or `group:NAME` of processes at
    the agent's Unix socket; empty: the socket's group may use all. `mount_roots`: directories below
    which views may be mounted; empty: no limit but the caller's own rights. `fleet`: the fleet's
    name, which issues tokens. `roles`: the rights of each role that a token may have; `reads`: the
    patterns of packages that its bearer may read."""

    keys: Annotated[dict[str, str], Meta(max_length=16)]
    authorities: Annotated[str, Meta(max_length=AUTHORITIES_BYTES_MAX)]
    revoked: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    public: Annotated[tuple[str, ...], Meta(max_length=1000)] = ()
    local: Annotated[dict[str, tuple[str, ...]], Meta(max_length=1000)] = {}
    mount_roots: Annotated[tuple[str, ...], Meta(max_length=100)] = ()
    fleet: Annotated[str, Meta(max_length=63)] = ""
    roles: Annotated[dict[str, tuple[str, ...]], Meta(max_length=1000)] = {}
    reads: Annotated[dict[str, tuple[str, ...]], Meta(max_length=1000)] = {}


class Keep(Message, frozen=True):
    """Hold this package, by digest, pinned for the owner `preseed:<id>`, for `left_s` seconds from
    now if that is given. `until` is the same moment by the tracker's clock, in seconds since the
    epoch, for agents that know no `left_s`. Sent again it changes nothing but requests a `Kept`,
    and after a failure another try."""

    id: PreseedId
    package: Annotated[str, Meta(max_length=512)]
    priority: Priority = "preseed"
    until: Annotated[float, Meta(ge=0)] | None = None
    left_s: float | None = None


class Evict(Message, frozen=True):
    """An operator wants a package to leave the store of this host, which answers with Evicted. What
    is mounted, pinned or being pulled stays. With a `digest`, of its manifest, all names of that
    package go, and `package` only says what people call it."""

    id: EvictionId
    package: Annotated[str, Meta(min_length=1, max_length=512)]
    digest: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")] = ""
    meaning: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")] = ""
    """The manifest that a tag names as the tracker knows it. It goes too: preseeds give hosts a
    package by digest, so no tag there says that this is it."""


class Release(Message, frozen=True):
    """The preseed needs the host no longer: the agent may evict what it pinned for the preseed, and
    fetches nothing more for it."""

    id: PreseedId


class Reject(Message, frozen=True):
    """A swarm or session cannot go on. `problem` is an RFC 9457 document. Without a blob it is
    about the session, or about one message of it; a tracker that ends a session says why in its
    last message."""

    problem: dict[str, Any]
    blob: WireDigest | None = None


FromAgent = (
    Hello
    | Holding
    | Holdings
    | Report
    | Complaint
    | Left
    | Leaving
    | Kept
    | PullFailed
    | Condition
    | Evicted
    | Spares
    | Vouched
    | Judged
    | EpochSeen
)
FromTracker = (
    Welcome
    | Pace
    | OriginShare
    | Assign
    | Access
    | Keep
    | Evict
    | Release
    | Reject
    | Listed
    | Reread
    | Recall
    | OwnershipChanged
    | NotOwner
)

_encoder = msgspec.json.Encoder()


@cache
def _from_agent() -> msgspec.json.Decoder[FromAgent]:
    """Made when it is first needed, as is the other one: that takes longer than all else here, and
    what asks the agent of its own host needs neither."""
    return msgspec.json.Decoder(FromAgent)


@cache
def _from_tracker() -> msgspec.json.Decoder[FromTracker]:
    return msgspec.json.Decoder(FromTracker)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_from_agent(data: bytes | str) -> FromAgent:
    """Raises UsageError when `data` is not a message of an agent."""
    try:
        return _from_agent().decode(data)
    except UNDECODABLE as error:
        raise UsageError(f"malformed session message: {' '.join(str(error).split())[:300]}") from error


def check_hello(hello: Hello) -> None:
    """Raises UsageError for a hello that every tracker would refuse."""
    try:
        _from_agent().decode(_encoder.encode(hello))
    except UNDECODABLE as error:
        raise UsageError(
            f"an agent cannot be named {hello.host!r} at {hello.address!r} in zone {hello.zone!r}, rack {hello.rack!r}: {error}",
            remedy="Give it a --name, --zone and --rack without white space, and an --advertise of the form host:port",
        ) from error


def decode_from_tracker(data: bytes | str) -> FromTracker:
    """Raises UsageError when `data` is not a message of a tracker."""
    try:
        return _from_tracker().decode(data)
    except UNDECODABLE as error:
        raise UsageError(f"malformed session message: {' '.join(str(error).split())[:300]}") from error


# -- joining a fleet (POST /v1/join with a join token, POST /v1/renew with a certificate)


class JoinRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/join: `token` is a join token (credentials/join.py), `host` the name of the
    agent's host, `request` a certificate signing request in PEM, `addresses` the IP addresses and
    names under which others reach the agent."""

    token: Annotated[str, Meta(max_length=1024)]
    host: Annotated[HostName, Meta(min_length=1)]
    request: Annotated[str, Meta(max_length=16384)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=64)] = ()


class RenewRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/renew, by the host in the certificate of the connection."""

    request: Annotated[str, Meta(max_length=16384)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=64)] = ()


class PackageKeys(msgspec.Struct, frozen=True):
    """Answer to GET /v1/keys: the keys of a sealed package by id, in base64 on the wire."""

    keys: dict[str, Annotated[bytes, Meta(min_length=32, max_length=32)]]

    def __repr__(self) -> str:
        return f"PackageKeys({len(self.keys)})"


class Joined(msgspec.Struct, frozen=True):
    """Answer to POST /v1/join and POST /v1/renew: the agent's certificate, and the certificates of
    the fleet's authorities, all PEM; `fleet` is the fleet's name."""

    fleet: str
    certificate: str
    authorities: str


class Reachability(msgspec.Struct, frozen=True):
    """Response of a tracker to GET /v1/hosts/{name}/reachability. `problem` is why the host cannot
    be reached at `address`, empty when it can; `seen_from` is the address from which the request
    came."""

    host: str
    address: str
    problem: str = ""
    seen_from: str = ""

    @property
    def hint(self) -> str:
        """The address where the host might be reached, if its request came from another one; text
        to append to `problem`."""
        from p2pdist.model.address import host_part  # with what this imports, for few

        here = host_part(self.address)
        return f" (the tracker sees this host at {self.seen_from})" if self.seen_from not in ("", here) else ""


# -- agent to agent


class StreamRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/streams: send the pieces of one stripe that `have` (a bitmap over all
    pieces, see PieceSet) lacks, oldest first and each once, as they become available. The response
    is a sequence of frames: piece number (u32 big-endian), length (u32 big-endian), bytes; the
    frame STREAM_END closes a stream in which everything asked for was sent. `demand`: a reader
    waits for these few pieces, at most DEMAND_PIECES_MAX. The agent has those that it lacks come
    first as well, and sends the host none of them in its other stream of the stripe. With
    `prefetch` a reader is going to wait: they come behind what readers wait for. With `rides` the
    host takes them over its other stream of the stripe, too, where that is open and asked for them:
    this stream ends when all have been sent over either. The sender sends no more than `bytes_s` in
    this stream, 0 for no limit."""

    blob: Digest
    stripe: int
    stripes: int
    have: bytes
    host: str = ""
    priority: Priority = "start"
    demand: bool = False
    prefetch: bool = False
    bytes_s: Annotated[float, Meta(ge=0)] = 0.0
    rides: bool = False


DEMAND_PIECES_MAX = 64


class BlobFile(msgspec.Struct, frozen=True):
    """Where a blob's bytes are in the store: a file of `size` bytes, of which those that were asked
    for, and all behind them up to `here`, are there and verified."""

    path: str
    size: int
    here: int
    inode: int = 0
    """Of that file: a blob that was removed and fetched again has another one. 0: not said."""


class ModelFile(msgspec.Struct, frozen=True):
    """A file of a model: its path, and the blob that it is."""

    path: str
    digest: WireDigest
    size: int


class ModelFiles(msgspec.Struct, frozen=True):
    """The files of a model; `digest` names its manifest. A model of a hub has none: its reference
    names the commit, and its files are those that LFS keeps."""

    reference: str
    digest: WireDigest | None
    files: list[ModelFile]


class BlobHolding(msgspec.Struct, frozen=True):
    """Response to GET /v1/blobs/{digest}/holding: the agent holds or fetches the blob and has
    `held` of its `pieces`. `settled`: it has chosen sources other than the host that asks, or needs
    none."""

    held: Count
    pieces: Count
    settled: bool


KNOWN_PIECES_BYTES_MAX = 256 << 10


class KnownPieces(msgspec.Struct, frozen=True):
    """Response to GET /v1/blobs/{digest}/pieces, as MessagePack of at most KNOWN_PIECES_BYTES_MAX:
    the BLAKE3 of each of `pieces`, 32 bytes a piece, as far as the agent knows them from the piece
    `first` of the query on, at most LISTED_MAX of them. `whole`: the agent has the blob, and the
    SHA-256 of the whole matched."""

    pieces: ListedPieces
    hashes: ListedHashes
    whole: bool = False


STREAM_END = 0xFFFFFFFF
"""Piece number of the closing frame, whose length is 0."""


# -- local API of an agent


class PullRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/pulls; exactly one of package (a reference) and blob (a digest). `lazy`: a
    package whose policy has it shown lazily is not pulled, and the status says so."""

    package: str | None = None
    blob: str | None = None
    output: str | None = None
    wait: bool = False
    priority: Priority = "start"
    lazy: bool = False


class PullStatus(msgspec.Struct, frozen=True):
    """Progress of a pull. Byte counts cover the layers, and each byte once: a byte that two sources
    sent counts for the first one (p2pdist_agent_received_bytes_total counts both); bytes_cached
    were in the store before. Of an image bytes_upstream takes the place of bytes_origin. `warning`
    says why the pull reads the origin, now or later, although other hosts have the content.
    `lazy`: nothing was pulled, since the package is to be shown lazily. `age_s` is how long ago the
    pull began, and `seconds` how long it took or takes. `tag_age_s` is how long ago a tracker or
    the origin last said what the tag names, where neither says so now; else None."""

    id: str
    state: Literal["waiting", "running", "done", "failed"]
    reference: str
    digest: str = ""
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_origin: int = 0
    bytes_peers: int = 0
    bytes_cached: int = 0
    seconds: float = 0.0
    note: str = ""
    output: str = ""
    error: dict[str, Any] | None = None
    warning: str = ""
    bytes_upstream: int = 0
    lazy: bool = False
    age_s: float = 0.0
    tag_age_s: float | None = None


MOUNT_METHODS = ("overlay", "erofs", "reflink", "hardlink", "copy", "unpack")
"""The mount methods that a request may name: "overlay" means any mounted one, "unpack" the best of
the others."""


class MountRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/mounts. An empty path lets the agent choose one in its store. `how` forces a
    mount method (MOUNT_METHODS), or requests the layer images, for a caller that can mount them
    itself: "userns" always, "images" only when the agent cannot mount. With `until_exit` the view
    belongs to the calling process: the agent unmounts it when that process, and the programs that
    were started from the view, have ended. Otherwise it stays until it is unmounted. `lazy`: the
    package is not pulled first, contents come while they are read; where that is not possible the
    answer is a problem whose member `eager` says why. `command` follows the package's entry point
    in the command line of the program that an `until_exit` view is for: it says which trace the
    view is filled by."""

    package: str
    path: str = ""
    writable: bool = False
    how: str = ""
    until_exit: bool = False
    lazy: bool = False
    command: tuple[str, ...] = ()


class LazyStatus(msgspec.Struct, frozen=True):
    """A lazy view: `whole` once nothing is missing. Bytes of contents in all, filled, and awaited
    by the `readers` that wait now; how many reads have waited (`stalls`), for how long at most half
    and 99 % of the last ones did, and how many got an error because nothing came (`refused`);
    how many reads found something missing (`misses`). `prefetched_bytes` were filled by a trace
    before they were read: `prefetch_hits` cells of them were read since, `unread_bytes` were
    not. It was mounted `shown_s` after its metadata had come, `metadata_bytes` of it; 0 where an
    earlier agent did so. It was asked for, or taken over, `age_s` ago; `steps` says after how many
    seconds each step of its start had ended. What its trace names has `trace_bytes` in packs."""

    whole: bool = False
    bytes_total: int = 0
    bytes_filled: int = 0
    bytes_awaited: int = 0
    readers: int = 0
    stalls: int = 0
    stall_p50_s: float = 0.0
    stall_p99_s: float = 0.0
    refused: int = 0
    misses: int = 0
    prefetched_bytes: int = 0
    prefetch_hits: int = 0
    unread_bytes: int = 0
    shown_s: float = 0.0
    metadata_bytes: int = 0
    age_s: float = 0.0
    steps: dict[str, float] = {}
    trace_bytes: int = 0


class MountStatus(msgspec.Struct, frozen=True):
    """A package that is mounted at `path`. `how` is the mount method, `why` the reason for it. With
    `how` "images" nothing is mounted: `images` are the verified layer images, bottom to top, kept
    until `path`, which is then a name beginning with "images/", is deleted. `device` and `inode`
    are what the agent sees at `path`, for callers whose mount namespace may differ; 0 where nothing
    is mounted. `pid` is the process that the view belongs to; 0: it stays until it is unmounted.
    `lazy` says how far a view is whose contents come while they are read, None for others. With
    both, `images` are the digests of images that are not here yet, and `image_bytes` their sizes:
    they are read by GET /v1/blobs/{digest}. `tags` are the references by tag that this package has
    on this host."""

    reference: str
    digest: str
    path: str
    how: str
    why: str = ""
    writable: bool = False
    entrypoint: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    working_dir: str = ""
    images: tuple[str, ...] = ()
    device: int = 0
    inode: int = 0
    pid: int = 0
    lazy: LazyStatus | None = None
    image_bytes: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()


class Pulls(msgspec.Struct, frozen=True):
    """Answer to GET /v1/pulls."""

    pulls: list[PullStatus]


class Mounts(msgspec.Struct, frozen=True):
    """Answer to GET /v1/mounts."""

    mounts: list[MountStatus]


class PackageStatus(msgspec.Struct, frozen=True):
    """A package or single blob in the store. `complete`: all its layers are there; `last_used` is
    in seconds since the epoch; `encrypted`: it came encrypted, and was opened here."""

    reference: str
    digest: Digest
    size: int
    complete: bool
    pinned: bool
    last_used: float
    encrypted: bool = False


class Packages(msgspec.Struct, frozen=True):
    """Answer to GET /v1/packages."""

    packages: list[PackageStatus]


class PackageUse(msgspec.Struct, frozen=True):
    """What a package, image or single blob takes on the disk of a host. `references` are all its
    names, tags first. `bytes_here` are in the store, `bytes_alone` of them become free when it
    goes: no other package needs them. `last_used` is in seconds since the epoch. `kept_by` says
    what keeps it: "tag", the owners of pins, "mount PATH", "pull", "transfer"; empty for what
    pruning removes."""

    references: tuple[str, ...]
    digest: Digest
    bytes_here: int
    bytes_alone: int
    last_used: float
    kept_by: tuple[str, ...]


class StoreUse(msgspec.Struct, frozen=True):
    """Answer to GET /v1/usage: packages, and the bytes that several of them share (each counted
    once), that none of them needs, and of documents. `bytes_total` counts against the `capacity`,
    which is null where only the disk limits the store."""

    packages: tuple[PackageUse, ...]
    bytes_shared: int
    bytes_nameless: int
    bytes_documents: int
    bytes_total: int
    capacity: int | None
    disk_free: int


PRUNED_MAX = 10_000
"""Packages that one request may name."""


class PruneRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/prune: remove what nothing keeps and what was not used for `unused_s`
    seconds, or with `dry_run` only say what that is. `tagged`: also what only a tag keeps. `only`:
    no others than these, such as the ones that a user was shown and agreed to; empty for all."""

    dry_run: bool = True
    tagged: bool = False
    unused_s: Annotated[float, msgspec.Meta(ge=0, le=1e10)] = 0.0
    only: Annotated[tuple[WireDigest, ...], msgspec.Meta(max_length=PRUNED_MAX)] = ()


class Pruned(msgspec.Struct, frozen=True):
    """Answer to POST /v1/prune: the packages that went, or would go; what stayed after all, with
    the reason; and the bytes that became free, or at least would."""

    dry_run: bool
    packages: tuple[PackageUse, ...]
    stayed: tuple[str, ...]
    bytes_freed: int


class PinRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/pins. An empty `owner` means the package's own name."""

    package: str
    owner: str = ""


class PinStatus(msgspec.Struct, frozen=True):
    """The layers that an owner protects from eviction and removal, by digest. `packages` are the
    packages here that they belong to, as far as they are known, and `size` the bytes of these."""

    owner: str
    layers: tuple[Digest, ...]
    packages: tuple[str, ...] = ()
    size: int = 0


class Pins(msgspec.Struct, frozen=True):
    """Answer to GET /v1/pins."""

    pins: list[PinStatus]


class Removed(msgspec.Struct, frozen=True):
    """The package that was removed, and the bytes that became free."""

    reference: str
    bytes_freed: int


class DrainRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/drain: serve children until they have other parents, for up to `seconds`
    (None: the agent's own limit), then end."""

    seconds: Annotated[float, Meta(ge=0, le=DRAIN_S_MAX)] | None = None


class Drained(msgspec.Struct, frozen=True):
    """Response to POST /v1/drain, just before the agent ends: the streams that were left, and how
    many seconds it took."""

    streams: int
    seconds: float


class VerifyRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/verify, whose response is a line of JSON (Verified) now and then. `bytes_s`
    limits the rate of reading the disk."""

    repair: bool = True
    bytes_s: Annotated[float, Meta(gt=0)] | None = None


class Verified(msgspec.Struct, frozen=True):
    """Progress of a verification: how many blobs and objects and how many bytes were read, and the
    names of the wrong ones. The last line (`done`) also has the packages that were pulled again,
    the ones that could not be pulled and why, and the mounted views (`shown`) that may still have
    wrong bytes."""

    checked: int
    bytes_checked: int
    wrong: tuple[str, ...]
    done: bool = False
    repaired: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
