"""Connections to a real PostgreSQL server: pinned settings, refusals, time limits."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg
import pytest
from psycopg import conninfo, sql

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SourceMisconfigured,
    SourceUnavailable,
    SpecError,
)
from deltaforge_dagster.sources.postgres.connection.server import SETTINGS, PostgresSourceServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import eventually
from tests.fix_postgres import StartPostgres

pytestmark = pytest.mark.postgres

PASSWORD = "s3cret-" + secrets.token_hex(4)


def with_parameters(dsn: str, **parameters: str | int) -> str:
    """Return the DSN with other parameters."""
    return conninfo.make_conninfo(dsn, **parameters)


def everything_said(error: BaseException) -> str:
    """Text of an error and of everything chained to it, shown or not."""
    told, pending = [], [error]
    while pending:
        one = pending.pop()
        told.append(f"{one!r} {one}")
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
    return "\n".join(told)


def server(dsn: str) -> PostgresSourceServer:
    """Return the server of a DSN."""
    return PostgresSourceServer.from_dsn(dsn, "deltaforge/test")


@pytest.fixture
def role(postgres_dsn: str) -> Iterator[str]:
    """A role with a password and no rights, named after nobody."""
    name = f"df_role_{secrets.token_hex(4)}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), PASSWORD)
        )
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def refused(dsn: str) -> DeltaforgeError:
    """Return the error of a connection, after checking that it holds no password."""
    with pytest.raises(DeltaforgeError) as caught, server(dsn).query(5):
        pass
    assert PASSWORD not in everything_said(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_settings_win_over_role_and_database(postgres_dsn: str, role: str) -> None:
    """Odd settings of the role and the database change nothing in a session of ours."""
    database = conninfo.conninfo_to_dict(postgres_dsn)["dbname"]
    odd = {
        "TimeZone": "Asia/Tokyo",
        "DateStyle": "German",
        "IntervalStyle": "iso_8601",
        "bytea_output": "escape",
        "extra_float_digits": "-3",
        "client_encoding": "LATIN1",
        "search_path": "public",
        "default_transaction_read_only": "on",
    }
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        for name, value in odd.items():
            for owner in (
                sql.SQL("ROLE {}").format(sql.Identifier(role)),
                sql.SQL("DATABASE {}").format(sql.Identifier(str(database))),
            ):
                connection.execute(
                    sql.SQL("ALTER {} SET {} = {}").format(owner, sql.SQL(name), value)
                )
    login = with_parameters(postgres_dsn, user=role, password=PASSWORD)

    with server(login).query(5) as connection:
        found = {name: connection.execute(f"SHOW {name}").fetchone() for name in SETTINGS}

    expected = SETTINGS | {
        "DateStyle": "ISO, MDY",
        "default_transaction_isolation": "read committed",
    }
    assert {name: row and row[0] for name, row in found.items()} == expected


def test_a_wrong_password_is_a_failed_login(postgres_dsn: str) -> None:
    """AuthFailed names the role and not the password."""
    error = refused(with_parameters(postgres_dsn, password=PASSWORD))

    assert isinstance(error, AuthFailed)
    assert "wrong password for role 'postgres', or there is no such role" in str(error)


def test_a_missing_password_is_a_failed_login(postgres_dsn: str) -> None:
    """A server that asks for a password and gets none refuses as with a wrong one."""
    assert isinstance(refused(with_parameters(postgres_dsn, password="")), AuthFailed)


def test_an_unknown_role_is_a_failed_login(postgres_dsn: str) -> None:
    """With password authentication PostgreSQL does not say that a role is unknown, and neither do we."""
    error = refused(with_parameters(postgres_dsn, user="nobody_here", password=PASSWORD))

    assert isinstance(error, AuthFailed)
    assert "wrong password for role 'nobody_here', or there is no such role" in str(error)


def test_a_role_that_the_server_calls_unknown(start_postgres: StartPostgres) -> None:
    """Where no password is asked for the server says what is wrong with the role; so do we."""
    dsn = start_postgres(None).dsn
    rules = [
        "host all ghost,sleeper 127.0.0.1/32 trust",
        "host all unwanted 127.0.0.1/32 reject",
        "host all all 127.0.0.1/32 scram-sha-256",
    ]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE sleeper")
        row = connection.execute("SHOW hba_file").fetchone()
        assert row is not None
        written = sql.SQL("COPY (SELECT unnest({}::text[])) TO {}").format(rules, str(row[0]))
        connection.execute(written)
        connection.execute("SELECT pg_reload_conf()")

    def said(user: str) -> str:
        error = refused(with_parameters(dsn, user=user, password=PASSWORD))
        assert isinstance(error, AuthFailed)
        return str(error)

    eventually(lambda: "28000" in said("ghost"), what="the reload")

    assert "login of role 'ghost' refused: role \"ghost\" does not exist" in said("ghost")
    assert 'role "sleeper" is not permitted to log in (SQLSTATE 28000)' in said("sleeper")
    assert "pg_hba.conf rejects connection" in said("unwanted")
    assert "wrong password for role 'stranger', or there is no such role" in said("stranger")


def test_an_unknown_database_needs_a_person(postgres_dsn: str) -> None:
    """SourceMisconfigured names the database."""
    error = refused(with_parameters(postgres_dsn, dbname="not_there"))

    assert isinstance(error, SourceMisconfigured)
    assert "/not_there: the database does not exist" in str(error)


def test_a_closed_port_may_open_later(postgres_dsn: str) -> None:
    """Connection refused is retryable and names host and port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    error = refused(with_parameters(postgres_dsn, port=port, password=PASSWORD))

    assert isinstance(error, SourceUnavailable)
    assert f"127.0.0.1:{port}" in str(error)
    assert "connection refused" in str(error)


def test_an_unknown_host_may_be_known_later(postgres_dsn: str) -> None:
    """A name that does not resolve is retryable: name servers fail, too."""
    error = refused(with_parameters(postgres_dsn, host="no-such-host.invalid", password=PASSWORD))

    assert isinstance(error, SourceUnavailable)
    assert "the host's name is unknown" in str(error)


def test_tls_that_the_server_lacks_needs_a_person(postgres_dsn: str) -> None:
    """`sslmode=require` against a server without TLS is a setting to change."""
    error = refused(with_parameters(postgres_dsn, sslmode="require", password=PASSWORD))

    assert isinstance(error, SourceMisconfigured)
    assert "TLS" in str(error)


@pytest.mark.parametrize("dsn", ["postgres://u:s3cret@[half", "host=h password='s3cret", "s3cret"])
def test_what_is_no_dsn_is_refused_without_repeating_it(dsn: str) -> None:
    """Nothing of a malformed DSN reaches the error or its causes."""
    with pytest.raises(SpecError) as caught:
        server(dsn)

    assert "s3cret" not in everything_said(caught.value)


def test_a_server_that_never_answers_costs_two_seconds(patience: pytest.MonkeyPatch) -> None:
    """A port that accepts and stays silent ends in SourceUnavailable after the connect timeout."""
    patience.undo()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        dsn = f"postgres://u:{PASSWORD}@127.0.0.1:{listener.getsockname()[1]}/d"
        began = time.monotonic()
        error = refused(dsn)

    assert isinstance(error, SourceUnavailable)
    assert 1.9 < time.monotonic() - began < 30


def test_a_server_that_hangs_is_cut_off(postgres_dsn: str) -> None:
    """A query ends in time even when the answer never comes over the network."""
    with silencing_proxy(postgres_dsn) as (dsn, silence):
        began = time.monotonic()
        with (  # noqa: PT012 - leaving the block is what must raise
            pytest.raises(SourceUnavailable, match=r"no answer within 3 s"),
            server(dsn).query(3) as connection,
        ):
            silence.set()
            connection.execute("SELECT 1")

    assert time.monotonic() - began < 30


def test_a_slow_statement_is_cancelled_by_the_server(postgres_dsn: str) -> None:
    """The statement timeout leaves half a second for the answer."""
    with (
        pytest.raises(SourceUnavailable, match="did not answer in time"),
        server(postgres_dsn).query(3) as connection,
    ):
        connection.execute("SELECT pg_sleep(60)")


def test_a_role_without_replication_is_told_the_statement(postgres_dsn: str, role: str) -> None:
    """PermissionMissing names ALTER ROLE."""
    login = server(with_parameters(postgres_dsn, user=role, password=PASSWORD))

    with (
        pytest.raises(PermissionMissing, match=f'ALTER ROLE "{role}" REPLICATION') as caught,
        login.query(5) as connection,
    ):
        login.replicate(connection, 5)

    assert PASSWORD not in everything_said(caught.value)


def test_a_replication_connection_takes_commands(postgres_dsn: str) -> None:
    """The socket after the handshake speaks the replication protocol, and holds nothing unread."""
    reached = server(postgres_dsn)
    with reached.query(5) as connection, closing(reached.replicate(connection, 5)) as stream:
        body = b"IDENTIFY_SYSTEM\0"
        stream.sendall(b"Q" + struct.pack("!i", len(body) + 4) + body)

        assert stream.recv(1) == b"T"
    assert stream.fileno() == -1, "nothing else keeps it open"


def test_the_server_shows_who_we_are(postgres_dsn: str) -> None:
    """Sessions carry the application name; long ones that differ at their ends stay different."""
    shown = []
    for end in "ab":
        named = PostgresSourceServer.from_dsn(postgres_dsn, f"deltaforge/{'p' * 99}{end}")
        with named.query(5) as connection:
            row = connection.execute("SELECT current_setting('application_name')").fetchone()
        assert row is not None
        shown.append(row[0])

    assert shown[0].startswith("deltaforge/ppp")
    assert shown[0] != shown[1]
    assert server(postgres_dsn).application_name == "deltaforge/test"
    assert (
        len(PostgresSourceServer.from_dsn(postgres_dsn, "ä" * 100).application_name.encode()) <= 63
    )


def test_representations_hide_the_password(postgres_server: PostgresServer) -> None:
    """`repr` of a server shows no parameter of the DSN."""
    dsn = postgres_server.dsn

    assert str(conninfo.conninfo_to_dict(dsn)["password"]) not in repr(server(dsn))


class silencing_proxy:  # noqa: N801 - reads as the context manager that it is
    """Forwards TCP connections, until the event is set: then it swallows everything."""

    def __init__(self, dsn: str) -> None:
        target = conninfo.conninfo_to_dict(dsn)
        self._target = (str(target["host"]), int(str(target["port"])))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._silent = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._dsn = with_parameters(dsn, port=self._listener.getsockname()[1])

    def __enter__(self) -> tuple[str, threading.Event]:
        self._spawn(self._accept)
        return self._dsn, self._silent

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._target)
            self._sockets += [client, upstream]
            self._spawn(self._forward, client, upstream)
            self._spawn(self._forward, upstream, client)

    def _forward(self, origin: socket.socket, target: socket.socket) -> None:
        try:
            while piece := origin.recv(65536):
                if not self._silent.is_set():
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
