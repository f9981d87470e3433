"""Which buckets an agent has and who may read them, as options and a settings file say."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdist.files import decoded, read_content
from p2pdist.gateway.s3.names import KEY_BYTES_MAX, is_bucket
from p2pdist.gateway.s3.signatures import AccessKey
from p2pdist.model.digest import Digest, parse_digest
from p2pdist.model.errors import UsageError
from p2pdist.model.manifest import Reference, parse_reference

BUCKETS_MAX = 1000
KEYS_MAX = 1000
BLOBS_MAX = 10_000
FILE_BYTES_MAX = 4 << 20
SECRET_CHARACTERS_MIN = 16


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """A bucket: the files of a package, or else blobs by key."""

    name: str
    package: Reference | None = None
    blobs: tuple[tuple[bytes, Digest], ...] = ()


@dataclass(frozen=True, slots=True)
class S3Settings:
    """What S3 clients are served. With `keys` their requests must be signed."""

    buckets: tuple[BucketSettings, ...] = ()
    keys: tuple[AccessKey, ...] = field(default=(), repr=False)


class _Bucket(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    package: str = ""
    blobs: Annotated[dict[str, str], Meta(max_length=BLOBS_MAX)] = {}


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,128}\Z")]
    secret: Annotated[str, Meta(min_length=SECRET_CHARACTERS_MIN, max_length=1024)]
    buckets: tuple[str, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    bucket: list[_Bucket] = []
    key: list[_Key] = []


def parse_bucket(text: str) -> BucketSettings:
    """A bucket as the command line names it, NAME=PACKAGE:TAG. Raises UsageError."""
    name, equals, source = text.partition("=")
    if not equals or not source:
        raise UsageError(f"{text[:200]!r} is no bucket", remedy="Write --bucket weights=team/weights:v3")
    return _bucket(_Bucket(name, source))


def s3_settings(options: Sequence[str], path: Path | None) -> S3Settings:
    """Buckets of options and of a settings file. Raises UsageError."""
    document = _read(path) if path is not None else _File()
    buckets = (*map(parse_bucket, options), *map(_bucket, document.bucket))
    keys = tuple(AccessKey(key.id, key.secret, key.buckets) for key in document.key)
    names = [bucket.name for bucket in buckets]
    _require_unique(names, "bucket", BUCKETS_MAX)
    _require_unique([key.id for key in keys], "access key", KEYS_MAX)
    if unknown := {name for key in keys for name in key.buckets} - set(names):
        raise UsageError(f"an access key names the bucket {min(unknown)[:100]!r}, of which nothing else is said")
    return S3Settings(buckets, keys)


def _read(path: Path) -> _File:
    try:
        file = read_content(path, FILE_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(file.data) > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        document = msgspec.convert(tomllib.loads(decoded(file.data)), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML") from error
    except msgspec.ValidationError as error:  # which names the field, never its value
        raise UsageError(f"{path}: {error}", remedy="It has tables [[bucket]] and [[key]]") from error
    if document.key and file.mode & 0o077:
        raise UsageError(
            f"{path} holds secrets, and users besides its owner may read it", remedy=f"Say chmod 600 {path}"
        )
    return document


def _bucket(plain: _Bucket) -> BucketSettings:
    name = plain.name
    if not is_bucket(name):
        raise UsageError(
            f"{name[:100]!r} is no name of a bucket",
            remedy="A name has 3 to 63 lower-case letters, digits, dots and hyphens",
        )
    if bool(plain.package) == bool(plain.blobs):
        raise UsageError(f"the bucket {name} has either a package or blobs")
    if not plain.blobs:
        return BucketSettings(name, parse_reference(plain.package))
    blobs = {key.encode(): parse_digest(digest) for key, digest in plain.blobs.items()}
    for key in blobs:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise UsageError(f"a key of the bucket {name} is empty, or has more than {KEY_BYTES_MAX} bytes")
    return BucketSettings(name, blobs=tuple(sorted(blobs.items())))


def _require_unique(names: Iterable[str], what: str, most: int) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"the {what} {name[:100]} is named twice", remedy="Name it once")
        seen.add(name)
    if len(seen) > most:
        raise UsageError(f"there are {len(seen)} of {what}, more than {most}")
