import pytest

from deltaforge_dagster.config.file.validation import field_names, field_table


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
    ("block", "names"),
    [
        ("", ["apiVersion", "kind", "storage", "metadata", "spec"]),
        ("spec.commit_policy", ["mode", "quorum"]),
        ("spec.nowhere", []),
    ],
)
def test_names_of_one_block(block: str, names: list[str]) -> None:
    """The names are those of the block that contains the unknown field."""
    assert field_names(block) == names
