"""Passwords and certificates, through `client_conf`, on a real broker that wants them."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from deltaforge_dagster.errors import AuthFailed, PermissionMissing, SpecError
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.kafka.sink import KafkaSink
from deltaforge_dagster.testing.sinks import ORIGIN, allow
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.deployment import eventually
from tests.fix_kafka import read_topic
from tests.sinks.kafka.test_sink import numbered, numbers, refused

pytestmark = pytest.mark.kafka

SECRET = "geheim"
NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Signs certificates, into a directory: `NAME.pem` is key and certificate together.

    They have the extensions of RFC 5280 that Python insists on from 3.13 on.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = self._builder(self._name, NOW + DAY).public_key(self._key.public_key())
        for extension, critical in (
            (x509.BasicConstraints(ca=True, path_length=None), True),
            (_SIGNS, True),
            (x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False),
        ):
            built = built.add_extension(extension, critical=critical)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(self, name: str, *, until: dt.datetime = NOW + DAY, password: str = "") -> Path:
        """Return the file of a new key and its certificate, for 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        built = self._builder(subject, until).public_key(key.public_key())
        signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = built.add_extension(here, critical=False).add_extension(signed_by, critical=False)
        file = self._directory / f"{name}.pem"
        file.write_bytes(
            key.private_bytes(
                Encoding.PEM,
                PrivateFormat.PKCS8,
                BestAvailableEncryption(password.encode()) if password else NoEncryption(),
            )
            + built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        )
        return file

    def _builder(self, subject: x509.Name, until: dt.datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(self._name, subject)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 10 * DAY)
            .not_valid_after(until)
        )


class SecureServer(KafkaServer):
    """A broker with a listener for each way to say who one is.

    Attributes:
        ports: `host:port` of each listener: `PASSWORD` takes PLAIN and SCRAM as they are, `SECRET`
            the same over TLS, `CERTIFICATE` wants one of the client, `EXPIRED` shows an old one.
        files: Certificates, by name.
    """

    ports: Mapping[str, str]
    files: Mapping[str, Path]

    def _listen(self, port: int) -> None:
        super()._listen(port)
        directory = self._directory()
        ours, foreign = Authority(directory, "ours"), Authority(directory, "foreign")
        self.files = {
            "ours": ours.file,
            "foreign": foreign.file,
            "server": ours.sign("server"),
            "expired": ours.sign("expired", until=NOW - DAY),
            "client": ours.sign("client", password=SECRET),
            "stranger": foreign.sign("stranger"),
        }
        protocols = {
            "PASSWORD": "SASL_PLAINTEXT",
            "SECRET": "SASL_SSL",
            "CERTIFICATE": "SSL",
            "EXPIRED": "SSL",
        }
        taken = set(re.findall(r":(\d+)", self._settings["listeners"]))
        self.ports = {}
        for name in protocols:
            found = next(one for one in map(str, iter(free_port, 0)) if one not in taken)
            taken.add(found)
            self.ports[name] = f"127.0.0.1:{found}"
        listeners = ",".join(f"{name}://{place}" for name, place in self.ports.items())
        kinds = ",".join(f"{name}:{kind}" for name, kind in protocols.items())
        mechanisms = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"
        self._settings |= {
            "listeners": f"{self._settings['listeners']},{listeners}",
            "listener.security.protocol.map": f"{kinds},PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": mechanisms,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(ours.file),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.files["server"]),
            "listener.name.expired.ssl.keystore.type": "PEM",
            "listener.name.expired.ssl.keystore.location": str(self.files["expired"]),
            "listener.name.certificate.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:df;User:CN=client",
        }
        module = "org.apache.kafka.common.security"
        for name in ("password", "secret"):
            self._settings |= {
                f"listener.name.{name}.plain.sasl.jaas.config": (
                    f'{module}.plain.PlainLoginModule required user_df="{SECRET}" '
                    f'user_nobody="{SECRET}";'
                ),
                f"listener.name.{name}.scram-sha-256.sasl.jaas.config": (
                    f"{module}.scram.ScramLoginModule required;"
                ),
                f"listener.name.{name}.scram-sha-512.sasl.jaas.config": (
                    f"{module}.scram.ScramLoginModule required;"
                ),
            }


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureServer]:
    """A broker that knows user `df`, who may do everything, and `nobody`, who may do nothing."""
    with SecureServer.start() as server:
        admin = AdminClient({"bootstrap.servers": server.brokers})
        for one in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            change: UserScramCredentialAlteration = UserScramCredentialUpsertion(
                "df", ScramCredentialInfo(one, 4096), SECRET.encode()
            )
            admin.alter_user_scram_credentials([change])["df"].result(90)
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            # The controller has the password, and soon the broker that is to know it.
            eventually(lambda: lets_in(server, login(mechanism)))  # noqa: B023 - called here
        yield server


def lets_in(server: SecureServer, conf: dict[str, str]) -> bool:
    """Say whether a user without TLS is known."""
    admin = AdminClient({"bootstrap.servers": server.ports["PASSWORD"], "log_level": 0, **conf})
    try:
        return bool(admin.list_topics(timeout=5).brokers)
    except KafkaException:
        return False


def login(mechanism: str, password: str = SECRET, user: str = "df") -> dict[str, str]:
    """Return the properties of a user without TLS."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }


def over_tls(mechanism: str, server: SecureServer, trusted: str = "ours") -> dict[str, str]:
    """Return the properties of a user over TLS."""
    trust = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(server.files[trusted])}
    return {**login(mechanism), **trust}


def certified(
    server: SecureServer, name: str = "client", trusted: str = "ours", password: str = SECRET
) -> dict[str, str]:
    """Return the properties of a client with a certificate."""
    file = str(server.files[name])
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": str(server.files[trusted]),
        "ssl.certificate.location": file,
        "ssl.key.location": file,
        "ssl.key.password": password,
    }


MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


@pytest.mark.parametrize("way", [*MECHANISMS, *(f"{one} over TLS" for one in MECHANISMS), "TLS"])
def test_the_ways_in(secure: SecureServer, way: str) -> None:
    """Each way delivers, exactly once too, where also the reader of the position logs in."""
    mechanism = way.partition(" ")[0]
    if way == "TLS":
        listener, conf = "CERTIFICATE", certified(secure)
    elif "TLS" in way:
        listener, conf = "SECRET", over_tls(mechanism, secure)
    else:
        listener, conf = "PASSWORD", login(mechanism)
    topic = way.replace(" ", "-")
    secure.create_topic(topic)
    for name, count in ((None, 3), (f"id-{topic}", 6)):
        sink = KafkaSink("out", secure.ports[listener], conf, transactional_id=name)
        sink.open()
        assert sink.position() is None
        given = numbered(3, topic)
        sink.send(replace(given, origin=ORIGIN) if name else given, allow)
        sink.close()
        assert numbers(read_topic(secure.brokers, topic)) == [0, 1, 2] * (count // 3)


REFUSED = {
    "PLAIN, wrong password": ("PASSWORD", "Authentication failed"),
    "SCRAM-SHA-256, wrong password": ("PASSWORD", "invalid credentials"),
    "SCRAM-SHA-512, wrong password": ("PASSWORD", "invalid credentials"),
    "a mechanism the broker does not have": (
        "PASSWORD",
        "[Mm]echanism.*not enabled|[Uu]nsupported.*mechanism",
    ),
    "another authority": ("SECRET", "certificate verify failed"),
    "an expired certificate": ("EXPIRED", "certificate verify failed"),
    "a name that is not in the certificate": ("SECRET", "certificate verify failed"),
    "a client's certificate that nobody signed": ("CERTIFICATE", "alert"),
    "no certificate of the client": ("CERTIFICATE", "alert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(secure: SecureServer, case: str) -> None:
    """Who is not let in, or does not trust the broker, hears why at once; no secret is in it."""
    listener, said = REFUSED[case]
    brokers = secure.ports[listener]
    conf = {
        "PLAIN, wrong password": login("PLAIN", "falsch"),
        "SCRAM-SHA-256, wrong password": login("SCRAM-SHA-256", "falsch"),
        "SCRAM-SHA-512, wrong password": login("SCRAM-SHA-512", "falsch"),
        "a mechanism the broker does not have": {
            **login("OAUTHBEARER"),
            "enable.sasl.oauthbearer.unsecure.jwt": "true",
            "sasl.oauthbearer.config": "principal=df",
        },
        "another authority": over_tls("PLAIN", secure, "foreign"),
        "an expired certificate": certified(secure),
        "a name that is not in the certificate": over_tls("PLAIN", secure),
        "a client's certificate that nobody signed": certified(secure, "stranger"),
        "no certificate of the client": {
            "security.protocol": "SSL",
            "ssl.ca.location": str(secure.files["ours"]),
        },
    }[case]
    if "name" in case:
        brokers = brokers.replace("127.0.0.1", "localhost")
    sink = KafkaSink("out", brokers, conf, send_timeout=20)
    with pytest.raises(AuthFailed, match=rf"sink out: kafka at .*{said}.*check security") as caught:
        sink.open()
    sink.close()
    assert "falsch" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_for_the_key_that_is_wrong(secure: SecureServer) -> None:
    """A key that cannot be read is a mistake of the file, without the password in it."""
    conf = certified(secure, password="falsch")
    with pytest.raises(SpecError, match=r"ssl.key.location") as caught:
        KafkaSink("out", secure.ports["CERTIFICATE"], conf).open()
    assert "falsch" not in str(caught.value)


def test_a_user_without_grants(secure: SecureServer) -> None:
    """Someone who is let in and may do nothing is told the grant, for a topic or the transactions."""
    secure.create_topic("closed")
    conf = login("PLAIN", user="nobody")
    sink = KafkaSink("out", secure.ports["PASSWORD"], conf, transactional_id="closed-id")
    sink.open()
    with pytest.raises(PermissionMissing, match=r"Write and Describe on the topic"):
        sink.send(numbered(3, "closed"), allow)
    with pytest.raises(PermissionMissing, match=r"on the transactional id"):
        sink.position()
    sink.close()


def test_the_wrong_protocol(secure: SecureServer) -> None:
    """Plain text to a TLS listener, or TLS to a plain one, ends with an error, never hangs."""
    tls = {"security.protocol": "SSL", "ssl.ca.location": str(secure.files["ours"])}
    for brokers, conf in ((secure.ports["CERTIFICATE"], {}), (secure.brokers, tls)):
        said = refused(conf, brokers)  # as if the connection were cut
        assert "check security.protocol" in said
