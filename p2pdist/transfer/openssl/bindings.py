"""What pyOpenSSL has of OpenSSL and keeps to itself: tests/transfer/test_openssl_client.py and
test_openssl_server.py fail where a name of these goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from OpenSSL import SSL

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

lib: Any = vars(SSL)["_lib"]
ffi: Any = vars(SSL)["_ffi"]


def exported(buffer: WriteableBuffer) -> Any:
    """Where the bytes of a buffer are, while the context is open. CPython 3.11 ends the process
    when it collects a memoryview in a cycle, such as one in the traceback of an error, while that
    is exported; so it must not be beyond a call."""
    return ffi.from_buffer(buffer, require_writable=True)


def verification(tls: SSL.Connection) -> tuple[int, str]:
    """How the check of the peer's certificate ended: OpenSSL's code, 0 for well, and text."""
    code = int(lib.SSL_get_verify_result(tls._ssl))
    return code, ffi.string(lib.X509_verify_cert_error_string(code)).decode("ascii", "replace")


def reason_of(error: SSL.Error) -> str:
    """What OpenSSL says, in a few words."""
    reports = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return "; ".join(dict.fromkeys(reason for _, _, reason in reports)) or "TLS had failed before"
