"""Accounts at registries: from a URL, or from Docker's config.json, which `docker login`, podman
and skopeo write.

The file names an account itself (`auths`), or a program that keeps it (`credHelpers` for one
registry, `credsStore` for all): `docker-credential-NAME get` reads the registry's name on standard
input and prints the account as JSON (github.com/docker/docker-credential-helpers). What it prints
may be valid for hours alone, so it is asked again after HELPER_S, and when a registry refuses it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2pdist.files import read_content
from p2pdist.model.errors import Unavailable, UsageError

CONFIG_BYTES_MAX = 4 << 20
HELPER_S = 300.0
"""So long an account that a helper named is used."""

HELPER_TIMEOUT_S = 15.0
HELPER_BYTES_MAX = 1 << 20
HUB_HOST = "registry-1.docker.io"
HUB_KEY = "https://index.docker.io/v1/"
"""The name of Docker Hub in config.json."""

_TOKEN_USER = "<token>"  # noqa: S105
"""The user that a helper names where its secret is an identity token."""

logger = logging.getLogger(__name__)
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Account:
    """A user and a password, or a token that is exchanged for others."""

    user: str
    password: str
    identity_token: str = ""

    def __repr__(self) -> str:
        """Without what is secret."""
        return f"Account({self.user!r})"

    def basic(self) -> str:
        """The header field of HTTP's basic scheme (RFC 7617)."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def given_away_by(self, token: str) -> bool:
        """Whether a token that a realm gave holds the account itself, as those of some registries
        do: then no other host may have it."""
        secrets = [secret for secret in (self.password, self.identity_token) if secret]
        texts = [token]
        for part in token.split("."):
            padded = part + "=" * (-len(part) % 4)
            for decode in (base64.b64decode, base64.urlsafe_b64decode):
                try:
                    texts.append(decode(padded).decode(errors="replace"))
                except ValueError:
                    continue
        return any(secret in text for secret in secrets for text in texts)


class Accounts(Protocol):
    """Where the account at one registry comes from."""

    async def account(self, *, refused: bool = False) -> Account | None:
        """The account; None for none. `refused`: the registry did not take the last one. Raises
        UsageError, Unavailable."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """An account that stays, or none."""

    known: Account | None

    async def account(self, *, refused: bool = False) -> Account | None:
        return self.known


@dataclass(slots=True)
class Helper:
    """An account that a helper program keeps."""

    name: str
    key: str
    """What the helper knows the registry by."""
    _known: Account | None = None
    _until: float = 0.0
    """Until when `_known` is used."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def account(self, *, refused: bool = False) -> Account | None:
        """Ask the helper, unless it answered a while ago."""
        async with self._lock:
            if refused or time.monotonic() >= self._until:
                self._known, self._until = await self._ask(), time.monotonic() + HELPER_S
            return self._known

    async def _ask(self) -> Account | None:
        program = f"docker-credential-{self.name}"
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                "get",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=HELPER_BYTES_MAX,
            )
        except OSError as error:
            raise UsageError(
                f"{program}, which Docker's config.json names for {self.key}, cannot be started: {error.strerror}",
                remedy=f"Install it, or write the account of {self.key} into auths",
            ) from error
        try:
            async with asyncio.timeout(HELPER_TIMEOUT_S):
                written, _ = await process.communicate(self.key.encode())
        except TimeoutError as error:
            raise Unavailable(f"{program} does not answer within {HELPER_TIMEOUT_S:.0f} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0 or len(written) > HELPER_BYTES_MAX:
            return None  # it says so of a registry that it does not know, too
        try:
            document = json.loads(written)
            user, secret = str(document["Username"]), str(document["Secret"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{program} prints no account for {self.key}") from error
        return Account("", "", secret) if user == _TOKEN_USER else Account(user, secret)


def docker_config() -> Path:
    """Docker's config.json of this user; a path where nothing can be for a user without a home."""
    try:
        folder = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
    except RuntimeError:  # neither HOME nor an entry in passwd(5)
        folder = os.devnull
    return Path(folder) / "config.json"


def docker_accounts(host: str, config: Path | None = None) -> Accounts:
    """The account that Docker's config.json has for a registry by its host and port. A file that is
    named must be there. Raises UsageError for one that cannot be read."""
    keys = (HUB_KEY, "docker.io", "index.docker.io") if host == HUB_HOST else ()
    keys = (*keys, host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/")
    return DockerConfig(config or docker_config(), keys, host, required=config is not None)


Stamp = tuple[int, int, int] | None


class DockerConfig:
    """The account of one registry in a file that Docker writes, which is read again when it
    changes: logins of some registries last for hours. A file that cannot be read then changes
    nothing."""

    def __init__(self, path: Path, keys: tuple[str, ...], host: str, *, required: bool) -> None:
        self._path, self._keys, self._host = path, keys, host
        self._stamp: Stamp = self._look()
        self._accounts = self._read(required=required)

    async def account(self, *, refused: bool = False) -> Account | None:
        """The account that the file names now."""
        stamp = await asyncio.to_thread(self._look)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._accounts = await asyncio.to_thread(self._read, required=True)
            except UsageError as error:
                logger.warning("the account for %s stays as it was: %s", self._host, error)
        return await self._accounts.account(refused=refused)

    def _look(self) -> Stamp:
        """What changes with the file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self, *, required: bool) -> Accounts:
        path, host = self._path, self._host
        try:
            data = read_content(path, CONFIG_BYTES_MAX).data
            if len(data) > CONFIG_BYTES_MAX:
                raise ValueError("it is too large")
            return _accounts_in(json.loads(data), self._keys)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not required:
                return Fixed(None)
            raise UsageError(f"there is no file {path} with credentials for {host}") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else "it has another form"
            raise UsageError(f"{path} has no credentials for {host}: {why}", remedy=f"docker login {host}") from error


def _accounts_in(document: Any, keys: tuple[str, ...]) -> Accounts:
    helpers = document.get("credHelpers") or {}
    helper = next(((helpers[key], key) for key in keys if key in helpers), None)
    if helper is None and document.get("credsStore"):
        helper = (document["credsStore"], keys[0])
    if helper is not None:
        name, key = helper
        if not _HELPER.match(name):
            raise ValueError("a helper is named by letters, digits, dots and dashes")
        return Helper(name, key)
    auths = document.get("auths") or {}
    entry = next((auths[key] for key in keys if key in auths), None)
    if not entry:
        return Fixed(None)
    if token := str(entry.get("identitytoken", "")):
        return Fixed(Account("", "", token))
    if "auth" in entry:
        user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        return Fixed(Account(user, password))
    return Fixed(Account(str(entry["username"]), str(entry["password"])))
