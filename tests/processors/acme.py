"""A package with processors, as a third party might publish it."""

from __future__ import annotations

import textwrap
from pathlib import Path

_MODULE = """
    from collections import Counter

    import pyarrow as pa
    from pydantic import BaseModel, ConfigDict


    class Label:
        class Config(BaseModel):
            model_config = ConfigDict(extra="forbid")
            topic: str

        def __init__(self, id, config):
            self.counts = Counter()
            self.topic = config.topic

        def process(self, frame):
            if self.topic == "raise":
                raise ValueError(frame.column("after")[0].as_py())
            if self.topic == "nothing":
                return None
            if self.topic == "short":
                return frame.select(["segment"])
            self.counts["labelled"] += frame.num_rows
            place = frame.schema.get_field_index("topic")
            topics = pa.array([self.topic] * frame.num_rows)
            return frame.set_column(place, frame.schema.field(place), topics)

        def close(self):
            pass


    def broken(id, config):
        raise RuntimeError("no")
"""

_ENTRY_POINTS = """
    [deltaforge_dagster.processors]
    label = acme_processors:Label
    broken = acme_processors:broken
"""


def install(folder: Path) -> None:
    """Write the package into a directory, as an installer would into `site-packages`."""
    folder.joinpath("acme_processors.py").write_text(textwrap.dedent(_MODULE))
    info = folder / "acme_processors-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-processors\nVersion: 1.0\n"
    )
    info.joinpath("entry_points.txt").write_text(textwrap.dedent(_ENTRY_POINTS))
    info.joinpath("RECORD").write_text("")
