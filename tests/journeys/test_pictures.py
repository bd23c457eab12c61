"""The pages of Dagster's UI that the documentation shows; `make pictures` makes its pictures of them anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.journeys.browser import Browser
from tests.journeys.installation import NAME, Installation, wait

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
    pytest.mark.soak("pictures"),
]

GROUP = "/locations/deltaforge_dagster/asset-groups/shop/lineage"
TABLE = "customers_lake"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser."""
    with Browser.started(tmp_path / "profile") as started:
        yield started


class Album:
    """Opens pages, checks what they show, and keeps a picture of each.

    Args:
        browser: The browser.
        url: Address of the UI.
        folder: Where the pictures are written.
    """

    def __init__(self, browser: Browser, url: str, folder: Path) -> None:
        self._browser = browser
        self._url = url
        self._folder = folder

    def take(self, name: str, page: str, *texts: str, click: str | None = None) -> None:
        """Open a page, click on something, wait until these texts are there, and keep a picture."""
        self._browser.open(f"{self._url}{page}")
        if click is not None:
            self._browser.click(click)
        self._browser.shows(*texts)
        self._browser.picture(self._folder / f"{name}.png")


def test_the_pages_of_the_docs(
    installation: Installation, browser: Browser, tmp_path: Path
) -> None:
    """Each shows what docs/ui.md says of it, while all is well and while a sink's table is held."""
    here = installation
    folder = Path(os.environ.get("DELTAFORGE_PICTURES", tmp_path))
    album = Album(browser, here.webserver.url, folder)
    for count in (3, 8, 13, 20):
        here.change(f"UPDATE customers SET name = name || '!' WHERE id <= {count}")
    range_page = f"/assets/{NAME}/sinks/redis?view=partitions&partition=0000000002"
    album.take("ui-range", range_page, "lag_seconds", "events_per_second")
    first = ("bytes", "bytes_per_second", "events", "events_per_second")
    album.take("ui-plots", f"/assets/{NAME}/changes?view=overview", *first, click="Plots")
    album.take("ui-health", f"/assets/{NAME}/health?view=overview", "dead_letters", click="Plots")
    chunk = f"/assets/{NAME}/snapshot?view=partitions&partition=public.customers/000002"
    album.take("ui-snapshot", chunk, "public.customers/000002", "chunks_read")
    album.take(
        "ui-schemas",
        f"/assets/{NAME}/schemas?view=partitions&partition=public.customers",
        "primary key",
    )
    album.take("ui-groups", "/asset-groups", f"{NAME}_lake", f"{NAME}_copy")
    album.take("ui-table", f"/assets/{NAME}/lake/public/{TABLE}?view=overview", "Row count", "25")
    album.take(
        "ui-sensor", f"/locations/deltaforge_dagster/sensors/{NAME}_work", "0 runs requested"
    )

    with psycopg.connect(here.copy) as connection:
        connection.execute("ALTER TABLE copied.customers DROP COLUMN name")
    here.shop.execute("UPDATE customers SET name = 'new' WHERE id = 1")

    def problems() -> Any:
        status = here.deployment.command("status", "--json")
        status.wait()
        return json.loads(status.last_line)["pipelines"][0]["problems"]

    assert "resync" in str(wait(problems, what="the problem")[0]["remedy"])
    well = f"/assets/{NAME}/health?view=checks&checkDetail=well"
    album.take("ui-checks", well, "Failed", "deltaforge resync shop --sink copy")
    album.take("ui-assets", GROUP, "changes", "snapshot", "schemas", "health")
    album.take("ui-catalog", "/assets", f"{NAME} / health")
