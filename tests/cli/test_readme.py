import re
from pathlib import Path

from deltaforge_dagster.cli.main import COMMANDS

README = Path(__file__).parents[2] / "README.md"


def test_every_command_is_in_the_readme() -> None:
    """The README's table of commands has exactly the existing commands."""
    named = re.findall(r"^\| `deltaforge (\w+)", README.read_text(), re.MULTILINE)

    assert set(named) == set(COMMANDS)


def test_it_begins_with_what_it_is_for() -> None:
    """Three lines of text, then a picture of the UI."""
    purpose, picture, *_ = README.read_text().partition("\n\n")[2].split("\n\n")

    assert len(purpose.splitlines()) <= 3
    assert max(map(len, purpose.splitlines())) <= 150
    assert re.fullmatch(r"!\[.+\]\(docs/images/ui-\w+\.png\)", picture)


def test_links_lead_somewhere() -> None:
    """Every file that a document links to exists."""
    documents = [README, *README.parent.glob("docs/**/*.md"), README.parent / "CONTRIBUTING.md"]
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
