"""The authority of a fleet: certificates for its trackers and agents (X.509, RFC 5280; names as in
SPIFFE, https://spiffe.io/docs/latest/spiffe-about/spiffe-concepts/).

A certificate names its owner twice. The URI `spiffe://FLEET/agent/HOST` is read by the other end
(`name_in`), which learns which host it speaks with. The DNS name is compared by TLS itself when a
connection is opened: TRACKER_DNS for trackers, `agent_dns(HOST)` for agents, a hash because names
of hosts need not be names of the DNS. An agent therefore reaches the host that its plan names, or
no host.

The subject of an agent's certificate names the join token by which the host came (`join_in`), so
that a tracker which knows nothing but the access file knows what the host may read.

A certificate lasts CERTIFICATE_S, and its owner renews it at half of that. An authority lasts until
an operator rotates it. A new authority has the name of the former one, which signs the new key as
well (NewWithOld of RFC 4210, 4.4): with that certificate in the chain, a client that knows only the
former authority trusts what the new one issues.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pdist.model.errors import Refused, UsageError

TRACKER_DNS = "tracker.p2pdist"
CERTIFICATE_S = 86400.0
AUTHORITY_S = 10 * 365 * 86400.0
BACKDATED_S = 7200.0
"""A new certificate is valid since so long ago: to hosts whose clocks are behind, too, by an hour
where one was set to the wrong zone or season."""

CSR_BYTES_MAX = 16384
ADDRESSES_MAX = 64

_DNS_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\Z")
UNREADABLE = (
    ValueError,
    TypeError,
    InternalError,  # a key of the wrong length, of a kind that OpenSSL has and this module has not
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What cryptography raises for PEM that it cannot read."""

_OWN_DOMAIN = "p2pdist"
"""The names that this module makes end with it; no certificate has another name there."""

_FLEET = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?\Z")

Kind = Literal["agent", "tracker"]


def agent_dns(host: str) -> str:
    """The DNS name in the certificate of a host's agent."""
    return f"{hashlib.sha256(host.encode()).hexdigest()[:40]}.agent.p2pdist"


def check_fleet(name: str) -> str:
    """Raises UsageError for what cannot be the name of a fleet."""
    if not _FLEET.match(name):
        raise UsageError(f"{name[:80]!r} cannot name a fleet", remedy="Use lower-case letters, digits, dots and dashes")
    return name


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate's DER form, in hexadecimal digits."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def name_in(peer: Mapping[str, Any] | None, fleet: str, kind: Kind) -> str:
    """The name of the owner in a verified certificate, as `ssl.SSLSocket.getpeercert` returns it:
    the host of an agent; "" where the certificate is of another fleet or kind, or missing."""
    prefix = f"spiffe://{fleet}/{kind}/"
    for what, value in (peer or {}).get("subjectAltName", ()):
        if what == "URI" and value.startswith(prefix):
            return unquote(value.removeprefix(prefix))
    return ""


def join_in(peer: Mapping[str, Any] | None) -> str:
    """The id of the join token by which the owner of a verified certificate came; "" where it names
    none."""
    for attributes in (peer or {}).get("subject", ()):
        for name, value in attributes:
            if name == "organizationalUnitName":
                return str(value)
    return ""


def issued_by_fleet(peer: Mapping[str, Any] | None, fleet: str) -> bool:
    """Whether the issuer of a verified certificate has the name of the fleet's authorities, and
    nothing beside it."""
    issuer = (peer or {}).get("issuer", ())
    return bool(issuer == ((("commonName", _authority_name(fleet)),),))


def names_authority(certificates: bytes, fleet: str) -> bool:
    """Whether one of these certificates, PEM, has the name of the fleet's authorities."""
    wanted = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _authority_name(fleet))])
    return any(found.subject == wanted for found in x509.load_pem_x509_certificates(certificates))


def dns_name_in(peer: Mapping[str, Any] | None) -> str:
    """The first DNS name in a verified certificate that is a plain one; "" without any."""
    for what, value in (peer or {}).get("subjectAltName", ()):
        if what == "DNS" and _DNS_NAME.match(value) and value.rpartition(".")[2].lower() != _OWN_DOMAIN:
            return str(value)
    return ""


def trust_domain_in(peer: Mapping[str, Any] | None) -> str:
    """The trust domain of the SPIFFE ID in a verified certificate; "" where it has none."""
    for what, value in (peer or {}).get("subjectAltName", ()):
        if what == "URI" and value.startswith("spiffe://"):
            return str(value.removeprefix("spiffe://").partition("/")[0])
    return ""


def addresses_in(peer: Mapping[str, Any] | None) -> frozenset[str]:
    """The IP addresses and DNS names in a verified certificate, in lower case; IPv6 addresses in
    their shortest form."""
    found = set()
    for what, value in (peer or {}).get("subjectAltName", ()):
        if what == "IP Address":
            found.add(str(ip_address(value.strip())))
        elif what == "DNS":
            found.add(value.lower())
    return frozenset(found)


def make_key() -> ec.EllipticCurvePrivateKey:
    """A new private key, ECDSA P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PEM of a private key, not encrypted: it stands in files of mode 0600."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate signing request (RFC 2986), PEM. It proves that its sender has the key; the
    authority decides on all names."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


@dataclass(frozen=True, slots=True)
class Authority:
    """One authority: its certificate, and its key, which only trackers have."""

    fleet: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, fleet: str, *, now: float) -> Authority:
        """A new one. `now`: seconds since the epoch."""
        key, name = (
            make_key(),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _authority_name(check_fleet(fleet)))]),
        )
        certificate = (
            _builder(name, name, key.public_key(), AUTHORITY_S, now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(fleet, certificate, key)

    @classmethod
    def load(cls, fleet: str, certificate: bytes, key: bytes) -> Authority:
        """From PEM. Raises UsageError where the two do not belong together or cannot be used."""
        try:
            loaded, private = (
                x509.load_pem_x509_certificate(certificate),
                serialization.load_pem_private_key(key, password=None),
            )
            fits = isinstance(private, ec.EllipticCurvePrivateKey) and private.public_key() == loaded.public_key()
        except UNREADABLE as error:
            raise UsageError(f"the authority of {fleet} cannot be read: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or not fits:
            raise UsageError(f"the key of the authority of {fleet} is not that of its certificate")
        return cls(fleet, loaded, private)

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        """What join tokens pin."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""
        return self.certificate.not_valid_before_utc.timestamp() + BACKDATED_S

    def issue(
        self,
        request: bytes,
        kind: Kind,
        name: str,
        addresses: Iterable[str] = (),
        *,
        now: float,
        lasts_s: float = CERTIFICATE_S,
        join: str = "",
    ) -> bytes:
        """A certificate, PEM, for the sender of a signing request, which becomes `name`: a host, or
        for a tracker any word. `addresses` are IP addresses and names under which other clients may
        reach it. `join` is the id of the join token by which an agent came. Raises UsageError for a
        request that is none, and for an address that no certificate may have."""
        key = _requested_key(request)
        uri = f"spiffe://{self.fleet}/{kind}/{quote(name, safe='')}"
        dns = TRACKER_DNS if kind == "tracker" else agent_dns(name)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri), x509.DNSName(dns)]
        names += map(_general_name, sorted(set(addresses))[:ADDRESSES_MAX])
        certificate = (
            _builder(_subject(join), self.certificate.subject, key, lasts_s, now)
            .add_extension(x509.SubjectAlternativeName(names), critical=not join)
            .add_extension(_OF_NO_AUTHORITY, critical=True)
            .add_extension(_SIGNS_NO_CERTIFICATES, critical=True)
            .add_extension(_FOR_BOTH_ENDS, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def introduce(self, newer: Authority, *, now: float) -> bytes:
        """A certificate of this authority, PEM, for the key of a newer one of the same fleet: part
        of the chain of what the newer one issues, for clients that know only this one."""
        key = newer.key.public_key()
        certificate = (
            _builder(newer.certificate.subject, self.certificate.subject, key, AUTHORITY_S, now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def pinned(certificates: bytes, pin: str) -> bytes:
    """Of the authorities that a tracker states (PEM, one after the other), the one with this
    fingerprint; raises Refused where none has it: it is another fleet's tracker, or a program
    that intercepts the connection."""
    for certificate in split_pem(certificates):
        if fingerprint(certificate) == pin:
            return certificate
    raise Refused(
        "the tracker's authority is not the one that the token pins",
        remedy="Check --tracker, or fetch the token again, from where the tracker's log says that it is",
    )


def split_pem(certificates: bytes) -> Sequence[bytes]:
    """PEM certificates one by one. Raises Refused for anything else."""
    try:
        loaded = x509.load_pem_x509_certificates(certificates)
    except UNREADABLE as error:
        raise Refused(f"what should be certificates cannot be read: {error}") from error
    return [certificate.public_bytes(serialization.Encoding.PEM) for certificate in loaded]


def expires_at(certificate: bytes) -> float:
    """When a PEM certificate ends, in seconds since the epoch. Raises ValueError."""
    return _loaded(certificate).not_valid_after_utc.timestamp()


def begins_at(certificate: bytes) -> float:
    """Since when a PEM certificate is valid, in seconds since the epoch. Raises ValueError."""
    return _loaded(certificate).not_valid_before_utc.timestamp()


def renews_at(certificate: bytes) -> float:
    """When the owner of a PEM certificate is to renew it: after half of its life, in seconds since
    the epoch. Raises ValueError."""
    loaded = _loaded(certificate)
    began = loaded.not_valid_before_utc.timestamp() + BACKDATED_S
    return (began + loaded.not_valid_after_utc.timestamp()) / 2


def owner_of(certificate: bytes) -> tuple[str, str, str]:
    """Fleet, kind and name of the owner that a PEM certificate names, which is not verified. Raises
    ValueError for one that names none."""
    try:
        names = _loaded(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *UNREADABLE) as error:
        raise ValueError("the certificate names no owner") from error
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        parts = uri.removeprefix("spiffe://").split("/")
        if uri.startswith("spiffe://") and len(parts) == 3:
            return parts[0], parts[1], unquote(parts[2])
    raise ValueError("the certificate names no owner")


def _loaded(certificate: bytes) -> x509.Certificate:
    """A PEM certificate. Raises ValueError."""
    try:
        return x509.load_pem_x509_certificate(certificate)
    except UNREADABLE as error:
        raise ValueError(f"the certificate cannot be read: {error}") from error


def _requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    if len(request) > CSR_BYTES_MAX:
        raise UsageError(f"a certificate signing request of {len(request)} bytes is over the limit")
    try:
        loaded = x509.load_pem_x509_csr(request)
        key, valid = loaded.public_key(), loaded.is_signature_valid
    except UNREADABLE as error:
        raise UsageError(f"the certificate signing request cannot be read: {error}") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise UsageError("the certificate signing request is not signed by an elliptic curve key of its own")
    return key


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        pass
    name = address.lower()
    if len(name) > 253 or not _DNS_NAME.match(name) or name.rpartition(".")[2] == _OWN_DOMAIN:
        raise UsageError(
            f"{address[:80]!r} cannot be an address in a certificate",
            remedy="Give IP addresses, or names of the DNS without wildcards",
        )
    return x509.DNSName(name)


def _authority_name(fleet: str) -> str:
    return f"p2pdist {fleet}"


def _subject(join: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, join)] if join else [])


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


_OF_NO_AUTHORITY = x509.BasicConstraints(ca=False, path_length=None)
_SIGNS_NO_CERTIFICATES = _usage(sign_certificates=False)
_FOR_BOTH_ENDS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts_s: float, now: float
) -> x509.CertificateBuilder:
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - datetime.timedelta(seconds=BACKDATED_S))
        .not_valid_after(at + datetime.timedelta(seconds=lasts_s))
    )
