"""What a run is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deltaforge_dagster.config.file.load import LoadedPipeline, load_document, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.testing.sinks import allow, messages
from deltaforge_lab.servers.http import HttpServer

SOURCE = {"id": "db", "dsn": "postgres://u@h/d", "slot": "s", "publication": "p", "tables": ["t"]}


def document(url: str) -> dict[str, Any]:
    """Return a pipeline with an HTTP sink."""
    return {
        "metadata": {"name": "shop", "tenant": "acme"},
        "spec": {
            "source": {"type": "postgres", "config": SOURCE},
            "sinks": [{"type": "http", "config": {"id": "out", "url": url}}],
        },
    }


def test_a_posted_pipeline_calls_public_addresses_only(
    tmp_path: Path, http_server: HttpServer
) -> None:
    """The same pipeline in a file of the installation may call every address."""
    path = tmp_path / "shop.yaml"
    path.write_text(yaml.safe_dump(document(http_server.url)))
    posted = load_document("x", document(http_server.url))
    assert isinstance(posted, LoadedPipeline)
    batch = messages([(http_server.url, "1")])
    with Platform(Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})).open() as opened:
        sink = build_run_context(opened, posted).build_sink("out")
        sink.open()
        with pytest.raises(SinkRejected, match="created by the REST API"):
            sink.send(batch, allow)
        sink.close()
        assert http_server.received == []

        sink = build_run_context(opened, load_pipeline(path)).build_sink("out")
        sink.open()
        sink.send(batch, allow)
        sink.close()
    assert len(http_server.received) == 1
