"""Signing keys of a fleet's trackers (Ed25519, RFC 8032): they sign tickets and tokens, and every
agent knows their public halves."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pdist.model.errors import UsageError

_RAW = serialization.Encoding.Raw
_PUBLIC = serialization.PublicFormat.Raw


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The private half, which only trackers have."""

    name: str
    """The first 16 hexadecimal digits of the SHA-256 of the public half."""
    private: Ed25519PrivateKey

    @classmethod
    def create(cls) -> SigningKey:
        """A new one."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, pem: bytes) -> SigningKey:
        """Raises UsageError for what is no Ed25519 key in PEM."""
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except InternalError as error:  # a key of another kind, of the wrong length
            raise UsageError("the signing key is no Ed25519 key") from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UsageError(f"the signing key cannot be read: {error}") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise UsageError("the signing key is no Ed25519 key")
        return cls._of(private)

    @classmethod
    def _of(cls, private: Ed25519PrivateKey) -> SigningKey:
        public = private.public_key().public_bytes(_RAW, _PUBLIC)
        return cls(hashlib.sha256(public).hexdigest()[:16], private)

    @property
    def pem(self) -> bytes:
        """PEM, not encrypted."""
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def public(self) -> str:
        """The public half in base64, as agents are told it."""
        return base64.b64encode(self.private.public_key().public_bytes(_RAW, _PUBLIC)).decode()

    def sign(self, message: bytes) -> bytes:
        """The signature of a message, 64 bytes."""
        return self.private.sign(message)


class VerifyKeys:
    """The public halves by name, as far as they are known here."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys`: base64 by name, as `SigningKey.public`; raises UsageError for what is none."""
        self._keys = {name: _public(text) for name, text in keys.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the signature is right; False also where no key has the name."""
        key = self._keys.get(name)
        if key is None:
            return False
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@lru_cache(maxsize=64)
def _public(text: str) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise UsageError(f"{text[:60]!r} is no public key") from error
