"""Credentials files on a server that knows nobody: operator, account and user are signed JWTs.

Claims are those of version 2 of NATS' JWTs (github.com/nats-io/jwt); keys are nkeys, Ed25519 keys in
base32 with a letter for their kind.
"""

from __future__ import annotations

import base64
import binascii
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltaforge_dagster.errors import AuthFailed, PermissionMissing
from deltaforge_dagster.sinks.nats.link import Login
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_lab.servers.nats import NatsServer
from tests.fix_nats import StartNats
from tests.sinks.nats.test_link import credentials, seed_of
from tests.sinks.nats_messages import allow, numbered

pytestmark = pytest.mark.nats

KINDS = {"operator": 14, "account": 0, "user": 20}
USER_LIMITS = dict.fromkeys(("subs", "data", "payload"), -1)  # none
LIMITS = {**USER_LIMITS, **dict.fromkeys(("imports", "exports", "conn", "leaf"), -1)}


def public_of(key: Ed25519PrivateKey, kind: str) -> str:
    """Return the public nkey: `O...`, `A...` or `U...`."""
    raw = bytes([KINDS[kind] << 3]) + key.public_key().public_bytes_raw()
    raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def signed(
    kind: str, key: Ed25519PrivateKey, by: Ed25519PrivateKey, issuer: str, **claims: Any
) -> str:
    """Return a JWT about a key, signed by another."""
    expires = {"exp": claims.pop("expires")} if "expires" in claims else {}
    body = {
        "jti": "id",
        "iat": int(time.time()) - 60,
        "iss": public_of(by, issuer),
        "name": kind,
        "sub": public_of(key, kind),
        "nats": {"type": kind, "version": 2, **claims},
        **expires,
    }
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    text = ".".join(_part(orjson.dumps(one)) for one in (header, body))
    return f"{text}.{_part(by.sign(text.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def test_a_server_with_an_operator(start_nats: StartNats, tmp_path: Path) -> None:
    """It lets a user in whom an account of its operator has signed, with that user's permissions.

    A user of another account, one whose time is over, and one with another's key are refused.
    """
    operator, account, stranger, user, thief = (Ed25519PrivateKey.generate() for _ in range(5))
    known = signed("account", account, operator, "operator", limits=LIMITS)
    server: NatsServer = start_nats(
        {
            "authorization": "",
            "jetstream": "",
            "operator": signed("operator", operator, operator, "operator"),
            "resolver": "MEMORY",
            "resolver_preload": f"{{ {public_of(account, 'account')}: {known} }}",
        }
    )

    def sink(
        by: Ed25519PrivateKey, key: Ed25519PrivateKey, subject: str, **claims: Any
    ) -> NatsSink:
        may = {"pub": {"allow": ["s.allowed"]}, **USER_LIMITS}
        jwt = signed("user", user, by, "account", **may, **claims)
        file = credentials(tmp_path / f"{binascii.crc32(jwt.encode())}.creds", seed_of(key), jwt)
        return NatsSink("sink", server.url, subject, Login(file))

    allowed, other = sink(account, user, "s.allowed"), sink(account, user, "s.other")
    for one in (allowed, other):
        one.open()
    assert allowed.send(numbered("s.allowed", 3), allow) == 2
    with pytest.raises(PermissionMissing, match=r"may not publish to .*s\.other"):
        other.send(numbered("s.other", 3), allow)
    for one in (
        sink(stranger, user, "s.allowed"),
        sink(account, user, "s.allowed", expires=int(time.time()) - 1),
        sink(account, thief, "s.allowed"),
    ):
        with pytest.raises(AuthFailed, match="refused credentials_file"):
            one.open()
        one.close()
    allowed.close()
    other.close()
