"""Server programs from a Debian release, with all their libraries, in a separate directory.

For programs that are not available elsewhere, such as the newest MySQL, on any Debian or Ubuntu
machine, without root and without changing what is installed. `apt-get` downloads the packages into
this project's cache, as if nothing were installed (so that the C library is included); `dpkg-deb`
unpacks them. A program then runs with the loader that came with it: `ld-linux-x86-64.so.2
--library-path ... program`.

The versions are not pinned, because a release changes, so only slow tests use this module. The
packages are signed by Debian, whose keys are in the package `debian-archive-keyring`.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Collection
from pathlib import Path

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.folders import user_cache
from deltaforge_dagster.installation.process import run_as

_LOADER = "ld-linux-x86-64.so.2"
_ARCHIVE = "https://deb.debian.org/debian"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def unpack(
    package: str, release: str, directory: Path, *, only: Collection[str] = ()
) -> tuple[str, ...]:
    """Unpack a package and its dependencies into `directory`; return the command of its loader.

    Args:
        package: Its name, such as `mysql-server-core`.
        release: The Debian release, such as `unstable`.
        directory: An empty or new directory.
        only: The packages to unpack; all if empty.

    Returns:
        The words that precede a program of the package in a command line.

    Raises:
        SettingsError: A required program is missing on this machine, or the package is not
            available.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb") and _KEYS.exists()):
        raise SettingsError(
            f"{package} comes from Debian {release}: it needs apt-get and debian-archive-keyring"
        )
    home = user_cache() / "debian" / release / package
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file in _download(package, release, home):
            if only and file.name.partition("_")[0] not in only:
                continue
            _execute(["dpkg-deb", "-x", str(file), str(directory)], package)
    # Releases up to bookworm keep the C library outside of /usr.
    folders = [directory / folder / "x86_64-linux-gnu" for folder in ("usr/lib", "lib")]
    loader = next(path for folder in folders if (path := folder / _LOADER).exists())
    return str(loader), "--library-path", ":".join(map(str, folders))


def _download(package: str, release: str, home: Path) -> list[Path]:
    """Return the files of the package and its dependencies; only new files are downloaded."""
    for name in ("lists/partial", "archives/partial"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / "status").touch()  # an empty status file: nothing is installed
    (home / "sources.list").write_text(
        f"deb [arch=amd64 signed-by={_KEYS}] {_ARCHIVE} {release} main\n"
    )
    options = {
        "APT::Architecture": "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Debug::NoLocking": "true",  # the system's locks are not needed
        "Dir::Cache": str(home),
        "Dir::Etc::SourceList": str(home / "sources.list"),
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": str(home),
        "Dir::State::Status": str(home / "status"),
    }
    apt = ["apt-get", "-q", "-y"]
    for name, value in options.items():
        apt += ["-o", f"{name}={value}"]
    _execute([*apt, "update"], package)
    _execute([*apt, "install", "--download-only", package], package)
    _execute([*apt, "autoclean"], package)  # versions that the release no longer has
    return sorted((home / "archives").glob("*.deb"))


def _execute(command: list[str], package: str) -> None:
    outcome = run_as(command, None, Path("/"))
    if outcome.returncode:
        message = " / ".join(outcome.stderr.strip().splitlines()[-3:])
        raise SettingsError(f"{package} is not available from Debian: {message or command[0]}")
