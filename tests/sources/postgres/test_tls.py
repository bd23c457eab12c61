"""Both clients over TLS: the DSN's sslmode means the same for queries and for the stream."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

from deltaforge_dagster.errors import AuthFailed, SourceMisconfigured
from deltaforge_dagster.installation.process import Account, temporary_directory
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.snapshot import copy_out
from deltaforge_dagster.testing.sources import (
    Versions,
    insert,
    inserts,
    take,
    whole,
)
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import FAST
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def certificate() -> Iterator[Path]:
    """A directory with a certificate of 127.0.0.1 that signs itself, and its key."""
    directory = temporary_directory("tls", Account.ordinary())
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", directory / "key", "-out", directory / "cert",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def server(certificate: Path) -> Iterator[PostgresServer]:
    """A server that offers TLS."""
    with PostgresServer.start(settings=FAST) as started:
        owner = started._data.stat()
        (certificate / "key").chmod(0o600)
        os.chown(certificate / "key", owner.st_uid, owner.st_gid)
        files = {"ssl_cert_file": certificate / "cert", "ssl_key_file": certificate / "key"}
        started.restart({"ssl": "on"} | {name: str(path) for name, path in files.items()})
        yield started


@pytest.mark.parametrize(
    ("sslmode", "encrypted"),
    [("disable", False), ("prefer", True), ("require", True), ("verify-full", True)],
)
def test_the_stream_is_as_encrypted_as_the_queries(
    server: PostgresServer, certificate: Path, sslmode: str, *, encrypted: bool
) -> None:
    """The mode rules both, and changes arrive the same, also while status messages go out."""
    parameters = {"sslmode": sslmode, "options": "-c wal_sender_timeout=4000"}
    if sslmode == "verify-full":
        parameters["sslrootcert"] = str(certificate / "cert")
    with PostgresBench(server.create_database()) as bench:
        dsn = conninfo.make_conninfo(bench.dsn, **parameters)
        start = bench.source(dsn=dsn).ensure_start()
        bench.execute("INSERT INTO orders SELECT n, n FROM generate_series(1, 30000) n")
        reader = bench.source(dsn=dsn)
        reading = reader.read(start, ReadLimits(), Versions())
        next(reading)

        assert (
            bench.value("SELECT ssl FROM pg_stat_ssl WHERE pid = %s", bench.reader()) is encrypted
        )
        reader.close()
        taken = take(bench, start, whole(30000), source=bench.source(dsn=dsn))
        assert taken.changes == inserts("orders", *range(1, 30001))


def test_a_certificate_that_nobody_vouches_for_is_refused(
    server: PostgresServer, certificate: Path, tmp_path: Path
) -> None:
    """verify-full with another root is a setting to change, for both clients."""
    other = tmp_path / "root"
    shutil.copy(
        ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt", other
    )
    dsn = conninfo.make_conninfo(server.dsn, sslmode="verify-full", sslrootcert=str(other))

    with (
        pytest.raises(SourceMisconfigured, match="certificate"),
        PostgresSourceServer.from_dsn(dsn, "t").query(5),
    ):
        pass

    trusting = conninfo.make_conninfo(server.dsn, sslmode="require")
    distrusting = PostgresSourceServer.from_dsn(dsn, "t")
    with (
        psycopg.connect(trusting, autocommit=True) as connection,
        pytest.raises(SourceMisconfigured, match="certificate"),
    ):
        distrusting.replicate(connection, 5)


def test_the_stream_reads_on_over_tls(server: PostgresServer) -> None:
    """A small change arrives at once: nothing decrypted waits unseen."""
    with PostgresBench(server.create_database()) as bench:
        dsn = conninfo.make_conninfo(bench.dsn, sslmode="require")
        start = bench.source(dsn=dsn).ensure_start()
        reader = bench.source(dsn=dsn)
        reading = reader.read(start, ReadLimits(max_wait=60.0), Versions())
        next(reading)
        for id_ in range(5):
            bench.execute(insert("orders", id_))
            began = time.monotonic()

            assert any(batch.rows for batch in reading)
            assert time.monotonic() - began < 30


def signed(directory: Path, name: str, *extra: str) -> None:
    """Make a key and a certificate of `name` that the directory's authority signs."""
    request = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    signing = ["x509", "-req", "-days", "2", "-CA", "ca", "-CAkey", "ca.key", "-CAcreateserial"]
    for command in (
        [*request, "-keyout", f"{name}.key", "-out", f"{name}.csr"],
        [*signing, "-in", f"{name}.csr", "-out", f"{name}.crt", *extra],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=directory)


@pytest.fixture(scope="module")
def demanding() -> Iterator[tuple[PostgresServer, Path]]:
    """A server that wants a client's certificate, and whose own is of another host."""
    directory = temporary_directory("tls", Account.ordinary())
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca",
        ],
        check=True, capture_output=True, cwd=directory,
    )  # fmt: skip
    signed(directory, "elsewhere")
    signed(directory, "postgres")
    with PostgresServer.start(settings=FAST) as started:
        owner = started._data.stat()
        os.chown(directory / "elsewhere.key", owner.st_uid, owner.st_gid)
        (started._data / "pg_hba.conf").write_text(
            "hostssl all all 127.0.0.1/32 scram-sha-256 clientcert=verify-full\n"
        )
        # Only to answer the question whether it runs: what a DSN leaves out comes from there.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PGSSLCERT", str(directory / "postgres.crt"))
            patch.setenv("PGSSLKEY", str(directory / "postgres.key"))
            started.restart(
                {
                    "ssl": "on",
                    "ssl_cert_file": str(directory / "elsewhere.crt"),
                    "ssl_key_file": str(directory / "elsewhere.key"),
                    "ssl_ca_file": str(directory / "ca"),
                }
            )
        yield started, directory
    shutil.rmtree(directory)


def test_client_certificates_and_an_authority_without_names(
    demanding: tuple[PostgresServer, Path],
) -> None:
    """verify-ca takes a server of any name, verify-full does not; the stream shows our certificate."""
    server, directory = demanding
    ours = {
        "sslcert": str(directory / "postgres.crt"),
        "sslkey": str(directory / "postgres.key"),
        "sslrootcert": str(directory / "ca"),
    }
    dsn = conninfo.make_conninfo(server.dsn, sslmode="verify-ca", **ours)

    with PostgresBench(dsn) as bench:
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

        full = conninfo.make_conninfo(dsn, sslmode="verify-full")
        distrusting = PostgresSourceServer.from_dsn(full, "t")
        with pytest.raises(SourceMisconfigured, match="certificate"), distrusting.query(5):
            pass
        with pytest.raises(SourceMisconfigured, match="certificate"):
            distrusting.replicate(bench.connection, 5)


@pytest.mark.parametrize("sslmode", ["verify-full", "verify-ca"])
def test_a_root_certificate_that_is_missing(
    server: PostgresServer, tmp_path: Path, sslmode: str
) -> None:
    """It is named, and is a setting to change: no server that might answer later."""
    dsn = conninfo.make_conninfo(server.dsn, sslmode=sslmode, sslrootcert=str(tmp_path / "none"))
    missing = f"sslrootcert names the file {tmp_path}/none, which cannot be read"
    missing_source = PostgresSourceServer.from_dsn(dsn, "t")
    with pytest.raises(SourceMisconfigured, match=missing), missing_source.query(5):
        pass


def test_a_client_certificate_that_is_missing(server: PostgresServer, tmp_path: Path) -> None:
    """Libpq does without it, where the server does not ask; the stream names it."""
    dsn = conninfo.make_conninfo(server.dsn, sslmode="require", sslcert=str(tmp_path / "none"))
    source = PostgresSourceServer.from_dsn(dsn, "t")
    with (
        source.query(5) as connection,
        pytest.raises(SourceMisconfigured, match=f"sslcert names the file {tmp_path}/none"),
    ):
        source.replicate(connection, 5)


def test_without_the_certificate_that_a_server_wants(
    demanding: tuple[PostgresServer, Path],
) -> None:
    """It is a setting to change, or a login that was refused, and never tried for ever."""
    server, directory = demanding
    dsn = conninfo.make_conninfo(server.dsn, sslmode="verify-ca", sslrootcert=str(directory / "ca"))

    with (
        pytest.raises((SourceMisconfigured, AuthFailed)) as caught,
        PostgresSourceServer.from_dsn(dsn, "t").query(5),
    ):
        pass
    assert "certificate" in str(caught.value)


def test_tables_are_read_over_tls(server: PostgresServer) -> None:
    """A snapshot's rows come encrypted, in buffers larger than TLS records, and every byte is there."""
    dsn = conninfo.make_conninfo(server.create_database(), sslmode="require")
    query = sql.SQL("SELECT n, repeat(md5(n::text), n % 50) FROM generate_series(1, 20000) AS n")
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        pieces = copy_out.buffers(connection, sql.SQL("COPY ({}) TO STDOUT").format(query))
        lines = b"".join(map(bytes, pieces))

        assert connection.pgconn.ssl_in_use
        with cursor.copy(sql.SQL("COPY ({}) TO STDOUT").format(query)) as sent:
            assert lines == b"".join(map(bytes, sent))
