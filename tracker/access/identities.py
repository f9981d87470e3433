"""Identities of requests: an agent by its certificate, a scheduler, operator or person by a bearer
token (RFC 6750), else a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from p2pdist.credentials.authority import dns_name_in, issued_by_fleet, join_in, name_in
from p2pdist.credentials.tokens import split_token, unverified, verify_token
from p2pdist.model.access import ANONYMOUS, Identity, agent_identity
from p2pdist.model.errors import Refused, Unauthenticated, UsageError
from tracker.access.directory import AccessState
from tracker.access.oidc import OidcIssuer


class Identities:
    """Finds identities by the access file in force."""

    def __init__(self, state: AccessState) -> None:
        self._issuer: OidcIssuer | None = None
        self.use(state)

    def use(self, state: AccessState) -> None:
        """This holds from now on."""
        self._state = state
        self._keys = state.public_keys
        oidc = state.rules.oidc
        if oidc is None:
            self._issuer = None
        elif self._issuer is None or self._issuer.document != oidc:
            self._issuer = OidcIssuer(oidc)

    async def of(self, peer: Mapping[str, Any] | None, authorization: str) -> Identity:
        """The identity of a request: `peer` is the verified certificate of its connection,
        `authorization` the header of that name. A token comes before a certificate. Raises
        Unauthenticated for a token that is not valid, Refused for what is revoked."""
        if authorization:
            return await self._bearer(authorization)
        return self.peer(peer) or ANONYMOUS

    def peer(self, peer: Mapping[str, Any] | None) -> Identity | None:
        """The host in a certificate; None where it is no agent's. A certificate of another
        authority names the host as the fleet's own do, or by its first DNS name. Raises Refused."""
        fleet = self._state.rules.fleet
        host = name_in(peer, fleet, "agent")
        if issued_by_fleet(peer, fleet):
            return self.agent(host, join_in(peer) or "?") if host else None
        host = host or dns_name_in(peer)
        return self.agent(host, "") if host and self._state.rules.certificates is not None else None

    def agent(self, host: str, join: str) -> Identity:
        """The identity of a host that came with the join token of this id, or with a certificate of
        another authority where the id is empty. Raises Refused where one of them is revoked, or the
        access file no longer has the token or the authority."""
        rules = self._state.rules
        rule = rules.joins.get(join) if join else rules.certificates
        if rule is None:
            raise Refused(
                f"{host[:100]} came with the join token {join[:63]!r}, which the access file no longer has",
                remedy="Let it join again with another",
            )
        identity = agent_identity(host, rule.read.joined(rules.public), rule.zones, join=join)
        for entry in (f"host:{host}", f"join:{join}"):
            if entry in rules.revoked:
                raise Refused(f"{entry[:100]} is revoked", remedy="p2pdist access unrevoke takes that back")
        return identity

    async def _bearer(self, authorization: str) -> Identity:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("only bearer tokens are taken", remedy="Send Authorization: Bearer TOKEN")
        try:
            _, text = split_token(text)
        except UsageError as error:
            raise Unauthenticated(error.what, remedy=error.remedy) from error
        key, issuer = unverified(text)
        if self._issuer is not None and key not in self._keys and issuer == self._issuer.document.issuer:
            identity = await self._issuer.identity(text, self._state.rules)
        else:
            identity = self._token(text)
        identity = replace(identity, read=identity.read.joined(self._state.rules.public))
        if identity.credential in self._state.rules.revoked:
            raise Unauthenticated("the token is revoked", remedy="Ask for another: p2pdist token create makes it")
        return identity

    def _token(self, text: str) -> Identity:
        rules = self._state.rules
        claims = verify_token(text, self._keys, rules.fleet)
        role = rules.roles.get(claims.role)
        if role is None:
            raise Unauthenticated(
                f"the token is of the role {claims.role}, which the access file no longer has",
                remedy="Ask for another: p2pdist token create makes it",
            )
        return role.identity("token", claims.name, credential=f"token:{claims.id}")
