"""A SPIFFE Workload API over gRPC on a Unix socket, and the authority of a trust domain: what an
agent of SPIRE gives to processes."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from spiffe._proto import workload_pb2, workload_pb2_grpc

DER = serialization.Encoding.DER
STREAMS_MAX = 64


class TrustDomain:
    """The authority of a trust domain."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rotate()

    def rotate(self) -> None:
        """Another key, and another certificate of the authority."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIRE")])
        self.authority = (
            self._builder(self._issuer, self._key, 86400.0)
            .add_extension(x509.BasicConstraints(True, None), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(_names(f"spiffe://{self.name}"), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        return self.authority.public_bytes(serialization.Encoding.PEM).decode()

    def svid(
        self, path: str, *dns: str, lasts_s: float = 3600.0, domain: str = "", bundle: bytes = b""
    ) -> workload_pb2.X509SVID:
        """An SVID `spiffe://DOMAIN/PATH` with DNS names, as the API sends it. `domain`: another one
        than that of the authority; `bundle`: the authorities of the domain, DER, by default this
        one."""
        key, identifier = ec.generate_private_key(ec.SECP256R1()), f"spiffe://{domain or self.name}/{path}"
        certificate = (
            self._builder(x509.Name([]), key, lasts_s)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(_names(identifier, *dns), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return workload_pb2.X509SVID(
            spiffe_id=identifier,
            x509_svid=certificate.public_bytes(DER),
            x509_svid_key=key.private_bytes(DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            bundle=bundle or self.authority.public_bytes(DER),
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lasts_s: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder(subject_name=subject, issuer_name=self._issuer, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(seconds=lasts_s))
        )


def _names(uri: str, *dns: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri), *map(x509.DNSName, dns)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


class WorkloadApi(workload_pb2_grpc.SpiffeWorkloadAPIServicer):  # type: ignore[misc]
    """Sends what `give` was given last to every stream that is open or is opened."""

    def __init__(self, path: Path, *svids: workload_pb2.X509SVID) -> None:
        self.path, self.address = path, f"unix://{path}"
        self._changed = threading.Condition()
        self._response, self._version = workload_pb2.X509SVIDResponse(svids=svids), 0
        self._server: Any = None
        self.streams = 0
        """How many were opened."""

    def start(self) -> WorkloadApi:
        self._server = grpc.server(futures.ThreadPoolExecutor(STREAMS_MAX))
        workload_pb2_grpc.add_SpiffeWorkloadAPIServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()
        return self

    def stop(self) -> None:
        """End all streams, and leave no socket."""
        if self._server is not None:
            server, self._server = self._server, None
            with self._changed:
                self._changed.notify_all()
            server.stop(None).wait(60)
            self.path.unlink(missing_ok=True)

    def give(self, *svids: workload_pb2.X509SVID, federated: dict[str, bytes] | None = None) -> None:
        with self._changed:
            self._response = workload_pb2.X509SVIDResponse(svids=svids, federated_bundles=federated or {})
            self._version += 1
            self._changed.notify_all()

    def FetchX509SVID(self, request: Any, context: Any) -> Iterator[workload_pb2.X509SVIDResponse]:
        if ("workload.spiffe.io", "true") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing from request")
        self.streams += 1
        sent = -1
        while context.is_active() and self._server is not None:
            with self._changed:
                if self._version == sent:
                    self._changed.wait(0.2)
                    continue
                sent, response = self._version, self._response
            if not response.svids:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "no identity issued")
            yield response
