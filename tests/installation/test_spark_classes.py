"""Tests of the archive of Spark's classes. Only that of its use starts a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.installation import spark_classes, spark_recording
from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.spark_server import SparkServer

ARCHIVES = """\
#!/bin/sh
for word; do case "$word" in -XX:SharedArchiveFile=*) echo archive > "${word#*=}"; esac; done
"""
REFUSES = """\
#!/bin/sh
echo "An error has occurred" >&2
exit 1
"""


def java_that(home: Path, program: str) -> Path:
    """Return the home directory of a Java whose program is a shell script."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(program)
    java.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, except for the one that starts Spark."""
    folder = tmp_path / "cache"
    if request.node.get_closest_marker("spark") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "deltaforge" / "spark"


def test_another_java_has_another_archive_in_the_same_place(tmp_path: Path, cache: Path) -> None:
    """An archive takes the place of the one that an upgrade has made useless, and is only this user's."""
    first, second = (java_that(tmp_path / name, ARCHIVES) for name in ("17", "21"))

    spark_classes.dump(first, [], tmp_path / "list")
    assert spark_classes.archive(first).read_text() == "archive\n"
    assert not spark_classes.archive(second).exists()
    spark_classes.dump(second, [], tmp_path / "list")

    assert list(cache.iterdir()) == [spark_classes.archive(second)]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_an_upgraded_java_needs_another_archive(tmp_path: Path) -> None:
    """The same place, but other bytes: Java would refuse the old archive."""
    java = java_that(tmp_path / "java", ARCHIVES)
    before = spark_classes.archive(java)
    os.utime(java / "bin" / "java", (1, 1))

    assert spark_classes.archive(java) != before


def test_java_that_makes_no_archive(tmp_path: Path, cache: Path) -> None:
    """The error has Java's last words, and nothing is left behind."""
    java = java_that(tmp_path / "java", REFUSES)

    with pytest.raises(
        SparkUnavailable, match="makes no archive of classes: An error has occurred"
    ):
        spark_classes.dump(java, [], tmp_path / "list")

    assert list(cache.iterdir()) == []


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_server_maps_the_archive(tmp_path: Path) -> None:
    """Once it is recorded, which `make test` does, Java has it in memory, most of it as it is in the file: not moved."""
    spark_recording.record()

    server = SparkServer.ensure(tmp_path)
    try:
        processes = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        maps = "".join(Path(f"/proc/{one}/maps").read_text() for one in processes)
    finally:
        server.stop()

    archive = str(spark_classes.archive(find_java()))
    mapped = [line for line in maps.splitlines() if line.endswith(archive)]
    assert any(" r--p " in line for line in mapped), maps  # a part that is moved is written to
