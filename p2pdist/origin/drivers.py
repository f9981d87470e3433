"""How a URL becomes an origin: each scheme has a driver.

The driver of a scheme is loaded when the first URL names it: obstore takes long to import, and most
commands read no bucket.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from p2pdist.model.errors import UsageError
from p2pdist.model.url import redacted
from p2pdist.origin.contract import WEB_SCHEMES, Origin
from p2pdist.origin.directory import Directory
from p2pdist.origin.layout import LayoutOrigin

BUCKET_SCHEMES = ("s3", "gs", "az")
_REMEDY = (
    "Origins are file:///directory, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix,"
    " oci://registry/repository, http://... and https://..."
)


def open_origin(url: str, *, serving: bool = False) -> Origin:
    """The origin at `url`; nothing is read yet. `serving`: a tracker or an agent takes a missing
    directory for storage that is away and may come back. Raises UsageError for a URL without a
    driver."""
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"{redacted(url)!r} is not an origin URL: {error}", remedy=_REMEDY) from error
    if scheme == "file":
        path = unquote(parts.path, errors="surrogateescape")  # a name of any bytes
        if host not in ("", "localhost") or not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
            raise UsageError(f"{redacted(url)!r} names no local directory", remedy="Write file:///absolute/path")
        return LayoutOrigin(Directory(Path(path), serving=serving))
    if scheme in BUCKET_SCHEMES or scheme in WEB_SCHEMES:
        from p2pdist.origin.bucket import Bucket

        if parts.port is not None and "@" in parts.path:
            remedy = "Write %2F for a slash in a password, and %40 for an @ in a path"
            raise UsageError(f"{redacted(url)!r}: it cannot be told where the password ends", remedy=remedy)
        if not host:
            raise UsageError(f"{redacted(url)!r} names no host or bucket", remedy=_REMEDY)
        if parts.fragment or (parts.query and scheme in BUCKET_SCHEMES):
            remedy = "Leave out what follows ? and #; settings and credentials of a bucket come from the environment"
            raise UsageError(f"the URL of {redacted(url)!r} has a part that is not used", remedy=remedy)
        return LayoutOrigin(Bucket(url))
    if scheme in ("oci", "oci+http"):
        from p2pdist.origin.registry.origin import RegistryOrigin

        return RegistryOrigin(url)
    raise UsageError(f"{redacted(url)!r} is not the URL of an origin", remedy=_REMEDY)
