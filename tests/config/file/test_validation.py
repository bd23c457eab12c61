import pytest

from deltaforge_dagster.config.file.validation import block_fields, field_table
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.sinks.http.sink_type import HttpTls
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig


def test_fields_of_every_form_are_listed() -> None:
    """Lists, nested blocks and both kinds of sinks are in the table."""
    assert {
        "metadata.name",
        "spec.source.config.start_position.lsn",
        "spec.sinks[].config.uri",
        "spec.sinks[].config.path",
        "spec.engine.range.max_seconds",
    } <= set(field_table())


@pytest.mark.parametrize(
    ("loc", "names"),
    [
        (("other",), {"apiVersion", "kind", "storage", "metadata", "spec"}),
        (("spec", "commit_policy", "other"), {"mode", "quorum"}),
        (("spec", "sinks", 0, "http", "config", "tls", "other"), set(HttpTls.model_fields)),
        (
            ("spec", "sinks", 0, "postgres", "config", "exactly_once"),
            set(PostgresSinkConfig.model_fields),
        ),
    ],
)
def test_names_of_one_block(loc: tuple[str | int, ...], names: set[str]) -> None:
    """The names are those of the form of the block that contains the unknown field, and of no other form."""
    assert set(block_fields(PipelineSpec, loc)) == names
