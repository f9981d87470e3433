"""Join tokens: with one a host becomes an agent of a fleet.

A token reads `p2pj1.PIN.ID.SECRET`. PIN is the fingerprint of the fleet's authority, so the first
contact needs no trust: a tracker with a certificate of another authority is refused
before the secret is sent (as in k3s, https://docs.k3s.io/cli/token). ID names the token in the
access file, where only the SHA-256 of the secret stands.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from p2pdist.model.errors import UsageError

_FORM = re.compile(r"p2pj1\.([0-9a-f]{64})\.([a-z0-9][a-z0-9-]{0,62})\.([0-9a-f]{32,128})\Z")
TOKEN_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A parsed join token."""

    pin: str
    """Fingerprint of the authority (credentials/authority.py)."""
    id: str
    secret: str

    def __repr__(self) -> str:
        """Without the secret: values stand in logs and tracebacks."""
        return f"JoinToken({self.pin[:12]}, {self.id})"

    def __str__(self) -> str:
        return f"p2pj1.{self.pin}.{self.id}.{self.secret}"

    @classmethod
    def create(cls, pin: str, name: str) -> JoinToken:
        """A new one with a secret of 256 bits."""
        return cls.parse(f"p2pj1.{pin}.{name}.{secrets.token_hex(32)}")

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Raises UsageError, whose text does not show what was given."""
        match = _FORM.match(text.strip())
        if match is None:
            raise UsageError(
                "that is no join token: it reads p2pj1.PIN.ID.SECRET",
                remedy="The tracker wrote one beside its access file when it made that file",
            )
        return cls(match[1], match[2], match[3])

    @property
    def secret_sha256(self) -> str:
        """What the access file keeps of the secret."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def fits(self, secret_sha256: str) -> bool:
        """Whether the access file has this secret; takes the same time either way."""
        return hmac.compare_digest(self.secret_sha256, secret_sha256)
