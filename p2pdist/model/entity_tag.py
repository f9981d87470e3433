"""Entity tags in the conditions of a request (RFC 9110, 8.8.3 and 13.1)."""

from __future__ import annotations

import re

_TAG = re.compile(r'(W/)?"([^"]*)"|[^\s,"]+')
"""A tag in quotes, or a word without: clients of S3 leave them out, as S3 lets them."""


def names_tag(field: str, own: str, *, weakly: bool = False) -> bool:
    """Whether the value of If-Match, or `weakly` that of If-None-Match, names the entity tag `own`
    or any. One that cannot be read names nothing."""
    for match in _TAG.finditer(field):
        weak, quoted = match.groups()
        if (match[0] if quoted is None else quoted) in (own, "*") and (weakly or not weak):
            return True
    return False
