"""Spark's Java classes as an archive for Java's class data sharing (JEP 310).

The server maps the archive into memory.

In its first seconds a Spark server loads 16,000 classes. Parsing and verifying them takes half of
the processor time of its start. `spark_recording.record` does that once for an installed Java and
PySpark, with a separate server, and `archive` finds the file (200 MB) for later servers of the same
user. Java itself checks whether an archive fits, and starts without one that does not.

An archive belongs to a class path, which may not contain a folder, and with which the class path of
later servers must begin. So Spark's jars come first (`class_path`), each by its name, because Java
does not sort the jars of a folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.folders import user_cache


def _installed() -> Path:
    # Not imported: the process that only watches the server would need four times its memory.
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


SPARK_HOME = _installed()
"""The folder of the installed PySpark, which contains Spark."""

JARS = SPARK_HOME / "jars"


def class_path(*later: Path | str) -> str:
    """Return a class path: Spark's jars, and what follows them."""
    return os.pathsep.join(map(str, (*_jars(), *later)))


def archive(java: Path) -> Path:
    """Return the path of the archive, which need not exist.

    Args:
        java: Home directory of the Java for which the archive is.
    """
    digest = hashlib.sha256()
    for file in (java / "bin" / "java", *_jars()):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns} ".encode())
    return _folder() / f"{_prefix()}{digest.hexdigest()[:16]}.jsa"


def dump(java: Path, options: Sequence[str], class_list: Path) -> None:
    """Write the archive, and delete older ones for the same PySpark.

    Args:
        java: Java's home directory.
        options: Options with which servers start.
        class_list: Names of classes, as `-XX:DumpLoadedClassList` writes them.

    Raises:
        SparkUnavailable: Java makes no archive.
        OSError: The folder cannot be written.
    """
    target = archive(java)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        command = [str(java / "bin" / "java"), "-Xshare:dump", *options]
        command += [f"-XX:SharedClassListFile={class_list}", f"-XX:SharedArchiveFile={draft}"]
        answer = subprocess.run(
            [*command, "-cp", class_path()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode or not draft.is_file():
            last = (answer.stderr.strip() or answer.stdout.strip()).splitlines()[-1:]
            raise SparkUnavailable(f"{java} makes no archive of classes: {''.join(last)}")
        with draft.open("rb") as file:
            os.fsync(file.fileno())  # Java crashes with an empty archive
        for old in target.parent.glob(f"{_prefix()}*.jsa"):
            old.unlink(missing_ok=True)
        draft.replace(target)


def _folder() -> Path:
    return user_cache() / "spark"


def _prefix() -> str:
    return hashlib.sha256(str(JARS).encode()).hexdigest()[:8] + "-"


@functools.cache
def _jars() -> Sequence[Path]:
    return sorted(JARS.glob("*.jar"))
