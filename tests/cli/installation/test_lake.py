"""`deltaforge lake`: the jars of a local repository, put where the Spark server looks for them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.installation import lake_jars
from deltaforge_dagster.installation.lake_jars import installed_jars
from deltaforge_dagster.installation.maven import Artifact
from tests.installation.test_maven import CONTENT, JAR, Repository, serving

OTHER = Artifact("org.other:jar:2", hashlib.sha256(b"other").hexdigest())


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A repository with the only jar that is needed."""
    monkeypatch.setattr(lake_jars, "LAKE_JARS", (JAR,))
    with serving() as found:
        yield found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The installation's home."""
    return tmp_path / "home"


def install(*options: str) -> Result:
    """Call the command."""
    return CliRunner().invoke(app, ["lake", "install", *options])


def test_installed_once(repository: Repository, home: Path) -> None:
    """The jar is downloaded into the home, where the server finds it; the second time it is only verified."""
    assert installed_jars(home / "jars") == []

    first = install("--repository", repository.url)

    assert first.exit_code == 0, first.output
    assert first.stdout == f"{home}/jars: 1 jar installed.\n"
    assert installed_jars(home / "jars") == [home / "jars" / JAR.file_name]
    assert (home / "jars" / JAR.file_name).read_bytes() == CONTENT
    assert home.stat().st_mode & 0o77 == 0

    again = install("--repository", repository.url, "--json")

    assert json.loads(again.stdout) == {"folder": f"{home}/jars", "installed": []}
    assert install("--repository", repository.url).stdout == f"{home}/jars: all jars are there.\n"
    assert len(repository.ranges) == 1


def test_a_damaged_jar_is_replaced(repository: Repository, home: Path) -> None:
    """A jar that is there but has another content counts as missing."""
    install("--repository", repository.url)
    (home / "jars" / JAR.file_name).write_bytes(CONTENT[:-1])

    assert install("--repository", repository.url).exit_code == 0
    assert (home / "jars" / JAR.file_name).read_bytes() == CONTENT


def test_a_folder_of_its_own(
    repository: Repository, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DELTAFORGE_LAKE_JARS moves the folder, which other users can read, as in an image; the home is not made."""
    monkeypatch.setenv("DELTAFORGE_LAKE_JARS", str(tmp_path / "opt" / "jars"))

    assert install("--repository", repository.url).exit_code == 0

    (jar,) = installed_jars(tmp_path / "opt" / "jars")
    assert jar.stat().st_mode & 0o444 == 0o444
    assert jar.parent.stat().st_mode & 0o555 == 0o555
    assert not home.exists()


def test_without_a_network(repository: Repository, home: Path, tmp_path: Path) -> None:
    """The folder of another machine is copied, after its files are verified."""
    install("--repository", repository.url)
    shutil.move(home / "jars", tmp_path / "stick")

    assert install("--from", str(tmp_path / "stick")).stdout == f"{home}/jars: 1 jar installed.\n"
    assert installed_jars(home / "jars")

    missing = install("--from", str(tmp_path / "nowhere"))
    assert missing.exit_code == 0  # nothing is missing, so nothing is copied
    shutil.rmtree(home / "jars")
    missing = install("--from", str(tmp_path / "nowhere"))
    assert missing.exit_code == 2
    assert f"nowhere/{JAR.file_name} does not exist: download https://repo1" in missing.stderr


def test_one_of_several_is_missing(
    repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure keeps what is complete, and the server starts without all of them."""
    monkeypatch.setattr(lake_jars, "LAKE_JARS", (JAR, OTHER))

    result = install("--repository", repository.url)

    assert result.exit_code == 2
    assert "error: org.other:jar:2 cannot be downloaded" in result.stderr
    assert (home / "jars" / JAR.file_name).exists()
    assert installed_jars(home / "jars") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--repository", "ftp://127.0.0.1"], "must be an http(s) URL"),
        (["--repository", "https://me:geheim@127.0.0.1"], "without user name and password"),
        (["--repository", "https://127.0.0.1", "--from", "x"], "exclude each other"),
    ],
)
def test_wrong_usage(options: list[str], said: str) -> None:
    """It is reported before anything is done, and without a password."""
    result = install(*options)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "geheim" not in result.output


def test_a_folder_that_cannot_be_written(repository: Repository, home: Path) -> None:
    """The error names the path and the setting."""
    home.write_text("no folder")

    result = install("--repository", repository.url)

    assert result.exit_code == 1
    assert f"error: {home}" in result.stderr
    assert "DELTAFORGE_HOME must be a directory" in result.stderr
