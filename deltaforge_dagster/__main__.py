"""`python -m deltaforge_dagster` is the `deltaforge` command."""

from deltaforge_dagster.cli.main import app

app(prog_name="deltaforge")
