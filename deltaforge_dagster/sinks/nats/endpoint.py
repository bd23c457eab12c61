"""Addresses of NATS servers, and the credentials for them.

Addresses are separated by commas: `nats://host:port`, `tls://host:port` to require TLS, or
`host:port`; the default port is 4222. A user and a password, or a token, may precede the host.

A credentials file (docs.nats.io, "NKeys and JWT", written by `nsc`) holds a user's JWT and the seed
of an Ed25519 key in base32 with a checksum. The server sends a nonce, and the user proves its
identity by signing it: the seed never leaves the process.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltaforge_dagster.errors import SettingsError, SpecError

_PORT = 4222
_BLOCK = re.compile(r"-{3,}BEGIN ([^-]+)-{3,}\s*(\S+)\s*-{3,}END")
_USER_SEED = 18 << 3, 20 << 3
"""Prefix bytes of a seed, and of one that belongs to a user (`S` and `U` in base32)."""


@dataclass(frozen=True, slots=True)
class Address:
    """One server: host and port, whether TLS is required, and the credentials in its URL."""

    host: str
    port: int
    tls: bool
    user: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        """Return the server's name for messages, without user and password."""
        return f"nats at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials: the first one of these that is set, or else those in the server's URL.

    Attributes:
        credentials_file: Path of a file with a JWT and a seed.
        username: User name; used together with `password`.
        password: Password; used together with `username`.
        token: Authentication token.
    """

    credentials_file: str | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None

    def fields(self, address: Address, nonce: str) -> dict[str, str]:
        """Return the fields of CONNECT with the credentials (docs.nats.io, "Client Protocol").

        Raises:
            SettingsError: The credentials file cannot be read, or holds something else.
        """
        if self.credentials_file is not None:
            return _signed(Path(self.credentials_file), nonce)
        if self.username is not None and self.password is not None:
            return {"user": self.username, "pass": self.password}
        if self.token is not None:
            return {"auth_token": self.token}
        if address.user is not None and address.password is not None:
            return {"user": address.user, "pass": address.password}
        return {} if address.user is None else {"auth_token": address.user}


def addresses(sink_id: str, urls: str) -> list[Address]:
    """Parse a comma-separated list of server URLs.

    Raises:
        SpecError: The list is invalid.
    """
    try:
        parsed = [_address(url.strip()) for url in urls.split(",")]
    except ValueError:
        # Not chained: the original message can repeat a password.
        raise SpecError(
            f"sink {sink_id}: url is not a list of NATS addresses: expected nats://host:port or "
            "tls://host:port, several with commas, and user and password percent-encoded"
        ) from None
    return parsed


def _address(url: str) -> Address:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    rest = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or rest:
        raise ValueError
    return Address(
        parts.hostname,
        _PORT if parts.port is None else parts.port,
        parts.scheme == "tls",
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )


def _signed(path: Path, nonce: str) -> dict[str, str]:
    try:
        blocks: Mapping[str, str] = dict(_BLOCK.findall(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the NATS credentials file {path} cannot be read: {error}") from error
    jwt = blocks.get("NATS USER JWT")
    seed = blocks.get("USER NKEY SEED")
    key = None if seed is None else _private_key(seed)
    if jwt is None or key is None:
        raise SettingsError(
            f"{path} is not a NATS credentials file: it needs the JWT and the seed of a user, as "
            "`nsc generate creds` writes them"
        )
    signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).rstrip(b"=").decode()
    return {"jwt": jwt, "sig": signature}


def _private_key(seed: str) -> Ed25519PrivateKey | None:
    """Return the key in a user's seed, or None if it is not one.

    A seed consists of two prefix bytes, 32 bytes of the key, and a CRC-16 (XMODEM).
    """
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        return None
    prefix = (raw[0] & 0xF8, (raw[0] & 7) << 5 | raw[1] >> 3) if len(raw) == 36 else None
    if prefix != _USER_SEED or binascii.crc_hqx(raw[:34], 0) != int.from_bytes(raw[34:], "little"):
        return None
    return Ed25519PrivateKey.from_private_bytes(raw[2:34])
