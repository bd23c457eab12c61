"""Where NATS servers are, and who we are there."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltaforge_dagster.errors import SettingsError, SpecError
from deltaforge_dagster.sinks.nats.link import Address, Login, addresses


def test_addresses() -> None:
    """Several with commas; user, password and token may be percent-encoded; the port is optional."""
    found = addresses("s", "nats://a, tls://u:p%40s@b:5222,t%2F@[::1]:1,host")

    assert found == [
        Address("a", 4222, tls=False),
        Address("b", 5222, tls=True, user="u", password="p@s"),
        Address("::1", 1, tls=False, user="t/"),
        Address("host", 4222, tls=False),
    ]
    assert str(found[1]) == "nats at b:5222"


@pytest.mark.parametrize(
    "url", ["", "a,", "http://a", "nats://a:x", "nats://a/b", "nats://geheim@"]
)
def test_what_is_no_address(url: str) -> None:
    """It is said without the text, which may have a password in it."""
    with pytest.raises(SpecError, match="not a list of NATS addresses") as caught:
        addresses("s", url)
    assert "geheim" not in str(caught.value)


def credentials(path: Path, seed: str, jwt: str = "a.b.c") -> str:
    """Write a credentials file as nsc does."""
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    return str(path)


def seed_of(key: Ed25519PrivateKey, kind: int = 20) -> str:
    """Return a seed; 20 makes it a user's."""
    raw = bytes([0x90 | (kind << 3) >> 5, ((kind << 3) & 31) << 3]) + key.private_bytes_raw()
    raw += binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def test_the_nonce_is_signed(tmp_path: Path) -> None:
    """The signature is that of the file's key over the server's nonce; the seed goes nowhere."""
    key = Ed25519PrivateKey.generate()
    login = Login(credentials(tmp_path / "u.creds", seed_of(key)), "u", "p", "t")

    fields = login.fields(Address("a", 1, tls=False), "nonce")

    assert seed_of(key).startswith("SU")
    assert set(fields) == {"jwt", "sig"}
    signature = base64.urlsafe_b64decode(fields["sig"] + "==")
    key.public_key().verify(signature, b"nonce")


def test_the_order_of_logins() -> None:
    """User and password come before the token, that before what the URL says."""
    plain = Address("a", 1, tls=False)
    named = Address("a", 1, tls=False, user="x", password="y")

    assert Login(None, "u", "p", "t").fields(named, "") == {"user": "u", "pass": "p"}
    assert Login(token="t").fields(named, "") == {"auth_token": "t"}
    assert Login().fields(named, "") == {"user": "x", "pass": "y"}
    assert Login().fields(Address("a", 1, tls=False, user="x"), "") == {"auth_token": "x"}
    assert Login().fields(plain, "") == {}


def test_what_is_no_credentials_file(tmp_path: Path) -> None:
    """A missing file, another kind of key and a damaged seed are said without the seed."""
    key = Ed25519PrivateKey.generate()
    damaged = seed_of(key)[:-3] + "AAA"
    (tmp_path / "none").write_text("geheim")
    names = [
        credentials(tmp_path / "account", seed_of(key, kind=0)),
        credentials(tmp_path / "damaged", damaged),
        credentials(tmp_path / "short", "SUA"),
        str(tmp_path / "none"),
        str(tmp_path / "missing"),
    ]
    for name in names:
        with pytest.raises(SettingsError, match="credentials file") as caught:
            Login(name).fields(Address("a", 1, tls=False), "n")
        assert "geheim" not in str(caught.value)
        assert damaged not in str(caught.value)
