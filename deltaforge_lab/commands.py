"""The commands that this package adds to `deltaforge`.

Its entry point in the group `deltaforge.commands` names them.
"""

from __future__ import annotations

COMMANDS = {
    "demo": (
        "deltaforge_lab.demo.command:demo",
        "Start everything, write live changes, and prove that each arrived.",
    ),
    "bench": (
        "deltaforge_lab.bench.app:app",
        "Measure how fast parts of the platform are on this machine.",
    ),
}
"""For each command: the module with its function or app, and its line in `--help`."""
