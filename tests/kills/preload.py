"""What the server process does once, before it forks children: import the run, and warm kernels."""

import contextlib
import io

from deltaforge_dagster.cli.installation.warm import warm
from tests.kills import child

__all__ = ["child"]

with contextlib.redirect_stdout(io.StringIO()):
    warm()
