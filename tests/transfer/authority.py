"""A certificate authority for tests: real keys, real certificates."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2pdist.transfer.tls import Tls, TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates into `directory`."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = directory / f"{name}.pem"
        builder = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.path.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, file: str = "host", *, host: str = "127.0.0.1", name: str = "") -> TlsFiles:
        """A certificate and key made out to a host name or address. `name`: what TlsFiles say to
        check in peers."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            subject = x509.DNSName(host)
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)]), key)
        certificate = builder.add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        files = TlsFiles(self.directory / f"{file}.pem", self.directory / f"{file}.key", self.path, name)
        pem = serialization.Encoding.PEM
        files.certificate.write_bytes(certificate.sign(self.key, hashes.SHA256()).public_bytes(pem))
        clear = serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, clear))
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder(subject_name=subject, issuer_name=self.name, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def server_by_ssl(tls: Tls) -> ssl.SSLContext:
    """A server's context by the ssl module, for what reads and writes without an event loop."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    context.load_cert_chain(tls.files.certificate, tls.files.key)
    context.load_verify_locations(tls.files.authority)
    return context
