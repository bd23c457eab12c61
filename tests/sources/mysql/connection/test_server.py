"""Connections to a real server: logins, TLS, ends in time, and what is said when they fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltaforge_dagster.errors import (
    AuthFailed,
    CorruptLog,
    DeltaforgeError,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.mysql.connection.refusals import translate
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_lab.servers.mysql import MysqlServer
from tests.fix_mysql import FAST

pytestmark = pytest.mark.mysql


def cipher(dsn: str) -> str:
    """Return the cipher of a connection, "" for one without TLS."""
    with MysqlSourceServer.from_dsn(dsn, "deltaforge/t").query(10) as session:
        return str(session.rows("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"])


def continues(dsn: str) -> bool:
    """Connect; return whether the server says that the connection continues an earlier TLS session."""
    with MysqlSourceServer.from_dsn(dsn, "deltaforge/t").query(10) as session:
        return str(session.rows("SHOW STATUS LIKE 'Ssl_sessions_reused'")[0]["Value"]) == "1"


@pytest.fixture(scope="module")
def authority() -> Iterator[tuple[MysqlServer, Path]]:
    """A server, and the certificate of the authority that it has made for itself."""
    with MysqlServer.start(settings=FAST) as server:
        yield server, server._data / "ca.pem"


class TestTls:
    """The modes of `ssl-mode`, as MySQL's own programs have them."""

    def test_it_is_used_where_the_server_has_it(self, mysql_dsn: str) -> None:
        """Without a word in the DSN the connection is encrypted."""
        assert cipher(mysql_dsn)
        assert cipher(f"{mysql_dsn}?ssl-mode=REQUIRED")
        assert not cipher(f"{mysql_dsn}?ssl-mode=DISABLED")

    def test_the_authority_is_checked(self, authority: tuple[MysqlServer, Path]) -> None:
        """VERIFY_CA takes the server's own authority; VERIFY_IDENTITY misses the host's name."""
        server, certificate = authority

        assert cipher(f"{server.dsn}?ssl-mode=VERIFY_CA&ssl-ca={certificate}")
        with pytest.raises(SourceMisconfigured, match="see ssl-mode and ssl-ca of the DSN"):
            cipher(f"{server.dsn}?ssl-mode=VERIFY_IDENTITY&ssl-ca={certificate}")

    def test_another_authority_is_refused(
        self, authority: tuple[MysqlServer, Path], mysql_dsn: str
    ) -> None:
        """A certificate that another authority signed ends the handshake."""
        _, certificate = authority

        with pytest.raises(SourceMisconfigured, match="see ssl-mode and ssl-ca of the DSN"):
            cipher(f"{mysql_dsn}?ssl-mode=VERIFY_CA&ssl-ca={certificate}")

    def test_a_connection_continues_the_session_of_the_last(self, mysql_dsn: str) -> None:
        """Other objects for the same DSN do so too, because each check, tick and run has its own."""
        dsn = f"{mysql_dsn}?ssl-mode=REQUIRED"

        assert not continues(dsn)
        assert continues(dsn)
        assert not continues(mysql_dsn)

    def test_after_a_failure_nothing_is_continued(self, mysql_dsn: str) -> None:
        """If the session were what the server did not like, the next attempt would fail as well."""
        where = mysql_dsn.partition("@")[2]
        dsn = f"mysql://leaver:geheim@{where}?ssl-mode=REQUIRED"
        with MysqlSourceServer.from_dsn(mysql_dsn, "deltaforge/t").query(10) as session:
            session.rows("CREATE USER 'leaver'@'%' IDENTIFIED BY 'geheim'")
            session.rows("GRANT ALL ON *.* TO 'leaver'@'%'")
            try:
                continues(dsn)
                assert continues(dsn)

                session.rows("ALTER USER 'leaver'@'%' ACCOUNT LOCK")
                with pytest.raises(DeltaforgeError):
                    continues(dsn)
                session.rows("ALTER USER 'leaver'@'%' ACCOUNT UNLOCK")

                assert not continues(dsn)
            finally:
                session.rows("DROP USER 'leaver'@'%'")

    def test_a_changed_file_is_read_again(
        self, authority: tuple[MysqlServer, Path], tmp_path: Path
    ) -> None:
        """A session that was verified with the file as it was is not continued."""
        server, certificate = authority
        trusted = tmp_path / "ca.pem"
        trusted.write_bytes(certificate.read_bytes())
        dsn = f"{server.dsn}?ssl-mode=VERIFY_CA&ssl-ca={trusted}"
        assert cipher(dsn)

        trusted.write_text("nothing")

        with pytest.raises(SourceMisconfigured, match="the files of ssl-ca"):
            cipher(dsn)

    def test_a_file_that_is_none(self, mysql_dsn: str, tmp_path: Path) -> None:
        """A missing or wrong file is named as the files of the DSN."""
        for mode in ("VERIFY_CA", "VERIFY_IDENTITY"):
            missing = f"ssl-ca names the file {tmp_path}/none.pem, which cannot be read"
            with pytest.raises(SourceMisconfigured, match=missing):
                cipher(f"{mysql_dsn}?ssl-mode={mode}&ssl-ca={tmp_path}/none.pem")

        assert cipher(f"{mysql_dsn}?ssl-mode=REQUIRED&ssl-ca={tmp_path}/none.pem"), "not used"


def test_a_password_of_any_characters(mysql_server: MysqlServer) -> None:
    """Percent-encoded in the DSN, outside of ASCII too."""
    with MysqlSourceServer.from_dsn(mysql_server.dsn, "deltaforge/t").query(10) as session:
        session.rows("CREATE USER IF NOT EXISTS 'odd'@'%' IDENTIFIED BY 'p@:/ß€'")
    where = mysql_server.dsn.partition("@")[2].partition("/")[0]

    assert cipher(f"mysql://odd:p%40%3A%2F%C3%9F%E2%82%AC@{where}/")
    with pytest.raises(AuthFailed, match="wrong password for user 'odd'"):
        cipher(f"mysql://odd:geheim@{where}/")
    with pytest.raises(AuthFailed, match="or there is no such user for connections from here"):
        cipher(f"mysql://nobody_here:geheim@{where}/")


class TestLogins:
    """The ways in which MySQL checks a password, with TLS and without."""

    @pytest.mark.parametrize(
        "plugin", ["caching_sha2_password", "sha256_password", "mysql_native_password"]
    )
    @pytest.mark.parametrize("ssl_mode", ["REQUIRED", "DISABLED"])
    def test_a_plugin(self, mysql_server: MysqlServer, plugin: str, ssl_mode: str) -> None:
        """The first login of `caching_sha2_password` sends the password, encrypted; later ones do not.

        Without TLS it is encrypted with the server's key.
        """
        user = f"{plugin[:12]}_{ssl_mode[:3].lower()}"
        with MysqlSourceServer.from_dsn(mysql_server.dsn, "deltaforge/t").query(10) as session:
            session.rows(f"CREATE USER '{user}'@'%' IDENTIFIED WITH {plugin} BY 'geheim'")
        where = mysql_server.dsn.partition("@")[2].partition("/")[0]
        dsn = f"mysql://{user}:geheim@{where}/?ssl-mode={ssl_mode}"
        try:
            for _ in range(2):
                assert bool(cipher(dsn)) == (ssl_mode == "REQUIRED")
            with pytest.raises(AuthFailed, match="wrong password"):
                cipher(dsn.replace("geheim", "falsch"))
        finally:
            with MysqlSourceServer.from_dsn(mysql_server.dsn, "deltaforge/t").query(10) as session:
                session.rows(f"DROP USER '{user}'@'%'")


@contextmanager
def listener(greeting: bytes) -> Iterator[int]:
    """Listen on a port, say a greeting, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                accepted.append(connection)
                connection.sendall(greeting)

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    for one in accepted:
        one.close()


@pytest.mark.parametrize("greeting", [b"", b"J\0\0\0\x0a8.0"])
def test_a_server_that_hangs_is_cut(greeting: bytes) -> None:
    """Whatever it has said: after the time given it is unavailable."""
    with listener(greeting) as port:
        began = time.monotonic()
        with pytest.raises(SourceUnavailable, match="no answer within 1 s"):
            cipher_within(port, 1)

    assert time.monotonic() - began < 30


def test_another_protocol_is_nobody(mysql_dsn: str) -> None:
    """A web server, say, is no MySQL server; no foreign error comes through."""
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100) as port,
        pytest.raises(DeltaforgeError),
    ):
        cipher_within(port, 2)


def cipher_within(port: int, seconds: float) -> None:
    """Connect to a port of this machine."""
    server = MysqlSourceServer.from_dsn(f"mysql://u:geheim@127.0.0.1:{port}/", "deltaforge/t")
    with server.query(seconds) as session:
        session.rows("SELECT 1")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Could not find first log file name in binary log index file", PositionLost),
        (
            "Cannot replicate because the master purged required binary logs. Replicate the",
            PositionLost,
        ),
        ("Client requested master to start replication from position > file size", PositionLost),
        ("Slave has more GTIDs than the master has, using the master's SERVER_UUID", PositionLost),
        (
            "A slave with the same server_uuid/server_id as this slave has connected to the master",
            SourceUnavailable,
        ),
        ("event read from binlog did not pass crc check; the first event", CorruptLog),
        ("Binary log is not open", SourceMisconfigured),
        ("something that nobody has said before", SourceUnavailable),
    ],
)
def test_the_end_of_a_dump_has_its_kind(text: str, kind: type[DeltaforgeError]) -> None:
    """Error 1236 covers them all; the words of the server tell them apart."""
    error = translate(1236, text, "MySQL h:3306", "u", "'u'@'%'".strip)

    assert type(error) is kind
    assert text[:20] in str(error)
