"""A real disk that is full: the journal's, and one that has the state store, too.

They are mounted for the test, which takes the right to mount. What needs none is in `test_disk_full`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.platform import Platform
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed

__all__ = ["shop"]

pytestmark = [
    pytest.mark.soak("faults"),
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
]

ROWS = 20_000
SEGMENT = 500
"""Changes per segment: so many segments need room in the state store, too."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted disk of its own."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> None:
        """Leave no byte on it."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
        assert os.statvfs(self.path).f_bavail == 0

    def make_room(self) -> None:
        """Free what `fill` took."""
        self._ballast.unlink()


@contextmanager
def disk(path: Path, megabytes: int) -> Iterator[Disk]:
    """Mount a disk of that size."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    ran = subprocess.run(mount, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.fail(f"a small disk cannot be mounted: {ran.stderr.strip()}", pytrace=False)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(params=["journal", "journal and store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Disk, dict[str, str]]]:
    """A small disk, and the settings of an installation that has something on it."""
    with disk(tmp_path / "small", 40) as mounted:
        if request.param == "journal":
            home = tmp_path / "home"
            journal = mounted.path.as_uri()
            yield mounted, {"DELTAFORGE_HOME": str(home), "DELTAFORGE_JOURNAL_URL": journal}
        else:
            yield mounted, {"DELTAFORGE_HOME": str(mounted.path / "home")}


def ids(feed: Feed) -> list[int]:
    """Return the keys of what arrived, in its order."""
    return [json.loads(one["df-event"])["after"]["id"] for one in feed.delivered("customers")]


def reasons(caplog: pytest.LogCaptureFixture) -> str:
    """Return why the run could not go on, as its log says."""
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    return "\n".join(str(one["reason"]) for one in fields if "reason" in one)


def test_a_full_disk_stops_capture_until_there_is_room(
    shop: Shop,
    spark_server: SparkAddress,
    tmp_path: Path,
    place: tuple[Disk, dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run's log names the full disk, and nothing half is left.

    With room again all goes on by itself: in the same run, or the next where the run could not keep
    its lease. Every row arrives, once and in order.
    """
    small, environment = place
    path = tmp_path / "small.yaml"
    path.write_text(
        shop.pipeline("small", tables="[public.customers]", run="{idle_seconds: 600}").replace(
            "  engine:\n", f"  engine:\n    segment: {{max_events: {SEGMENT}}}\n"
        )
    )
    home = Path(environment["DELTAFORGE_HOME"])
    settings = Settings.from_env({**environment, **spark_server.settings(home)})
    with Platform(settings, single_process=True).open() as opened:
        feed = Feed(shop, opened, path)
        feed.catch_up()
        shop.execute("INSERT INTO customers SELECT n, 'first' FROM generate_series(1, 10) n")
        run = feed.begin()
        eventually(lambda: len(ids(feed)) == 10, what="what came before")

        small.fill()
        shop.execute(
            "INSERT INTO customers SELECT n, md5(n::text) || md5((-n)::text)"
            f" FROM generate_series(11, {ROWS}) n"
        )
        eventually(lambda: "no space left for the journal" in reasons(caplog), what="the warning")
        assert len(ids(feed)) == 10
        small.make_room()
        eventually(lambda: run.ended or len(ids(feed)) >= ROWS, what="delivery or end")
        if not run.ended:
            assert run.end().capture_error is None
        assert feed.catch_up().capture_error is None

        assert ids(feed) == list(range(1, ROWS + 1))
        for segment in feed.store.segments.read("small"):
            opened.journal.verify(segment)
