"""What a certificate says, in the form in which the ssl module puts it."""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion)
"""What cryptography raises for certificates and keys that it cannot read."""

_ATTRIBUTES = {
    NameOID.COMMON_NAME: "commonName",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "organizationalUnitName",
    NameOID.ORGANIZATION_NAME: "organizationName",
    NameOID.COUNTRY_NAME: "countryName",
    NameOID.LOCALITY_NAME: "localityName",
    NameOID.STATE_OR_PROVINCE_NAME: "stateOrProvinceName",
    NameOID.SERIAL_NUMBER: "serialNumber",
}


def described(certificate: x509.Certificate) -> dict[str, Any]:
    """A certificate's subject, issuer and alternative names of DNS and URI, as
    ssl.SSLSocket.getpeercert puts them. Raises ValueError for one that cannot be read."""
    fields: dict[str, Any] = {"subject": _name(certificate.subject), "issuer": _name(certificate.issuer)}
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return fields
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(f"the certificate cannot be read: {error}") from None
    kinds = {x509.DNSName: "DNS", x509.UniformResourceIdentifier: "URI"}
    fields["subjectAltName"] = tuple((kinds[type(name)], name.value) for name in names if type(name) in kinds)
    return fields


def _name(name: x509.Name) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple(
        tuple((_ATTRIBUTES.get(part.oid, part.oid.dotted_string), _text(part.value)) for part in several)
        for several in name.rdns
    )


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.hex()
