"""The contexts for both ends of connections, made of Credentials: TLS 1.3 alone, and OpenSSL's own
check of the peer's chain, without a callback that could let one through."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from OpenSSL import SSL, crypto

from p2pdist.transfer.openssl.certificate import UNREADABLE
from p2pdist.transfer.tls import Credentials, TlsError, file_of

CIPHERS = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
"""What TLS 1.3 has, the cheapest first, which every implementation must have (RFC 8446, 9.1). A
client offers them in this order, and a server takes the first of the client's."""

_clients: WeakKeyDictionary[Credentials, SSL.Context] = WeakKeyDictionary()
_servers: WeakKeyDictionary[Credentials, SSL.Context] = WeakKeyDictionary()
_lock = threading.Lock()
"""Held while these are used."""


def client_context(credentials: Credentials) -> SSL.Context:
    """The context for connections to others, made once. Raises TlsError for credentials that cannot
    be used."""
    return _kept(_clients, credentials, SSL.TLS_CLIENT_METHOD)


def server_context(credentials: Credentials) -> SSL.Context:
    """The context for connections of others, made once. Raises TlsError for credentials that cannot
    be used. No session is taken up again: it would outlive its certificate. OpenSSL sends tickets
    all the same, which pyOpenSSL cannot forbid, of sessions that nothing keeps. So bytes lie unread
    at a client that reads nothing, and where it closes then its kernel drops what it had yet to
    send; a client of HTTP reads the response."""
    return _kept(_servers, credentials, SSL.TLS_SERVER_METHOD)


def _kept(contexts: WeakKeyDictionary[Credentials, SSL.Context], credentials: Credentials, method: int) -> SSL.Context:
    with _lock:
        context = contexts.get(credentials)
        if context is None:
            try:
                context = contexts[credentials] = _made(credentials, method)
            except (SSL.Error, crypto.Error, OSError, *UNREADABLE) as error:
                raise TlsError(f"pyOpenSSL cannot use the certificates and the key of this host: {error}") from error
        return context


def _made(credentials: Credentials, method: int) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(CIPHERS)
    strangers = method == SSL.TLS_SERVER_METHOD and credentials.strangers
    context.set_verify(SSL.VERIFY_PEER | (0 if strangers else SSL.VERIFY_FAIL_IF_NO_PEER_CERT))
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    _identify(context, credentials)
    for pem in credentials.authorities:
        with file_of(pem.encode("ascii")) as authorities:
            context.load_verify_locations(authorities)
    return context


def _identify(context: SSL.Context, credentials: Credentials) -> None:
    """Let a context show the certificate, its chain, and prove it by the key."""
    with file_of(credentials.chain) as chain, file_of(credentials.key) as key:
        context.use_certificate_chain_file(chain)
        context.use_privatekey_file(key)
    context.check_privatekey()
