"""How much of what a test does is left to chance.

Nothing in the gate (`make check`, `make test`, and any run of pytest without options): each run tries the same
examples, so that a change is not blamed for what it did not break. New examples are looked for with
Hypothesis's profile `soak`, which `--soak` and `--hypothesis-profile soak` choose. What is found becomes an
`@example`, or a test of its own.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

_GATE_EXAMPLES = 100
_SOAK_EXAMPLES = 2_000
_FOUND = Path(__file__).parents[1] / ".hypothesis" / "examples"

# How long an example takes, to run or to draw, says more about the machine than about the code.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile(
    "gate", _TIMELESS, derandomize=True, database=None, max_examples=_GATE_EXAMPLES
)
settings.register_profile(
    "soak",
    _TIMELESS,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(_FOUND),
    max_examples=int(os.environ.get("DELTAFORGE_TEST_EXAMPLES", _SOAK_EXAMPLES)),
    print_blob=True,
)
settings.load_profile("gate")


def is_wanted() -> bool:
    """Say whether each run shall be another one."""
    return not settings().derandomize


def examples(gate: int) -> int:
    """Return how many examples of a test to try: so many in the gate, in proportion otherwise."""
    return max(1, gate * settings().max_examples // _GATE_EXAMPLES)


def seed_for(name: str) -> int:
    """Return where the random numbers of what has this name begin.

    Where chance is wanted it comes from `random`, so that `--randomly-seed` repeats it.
    """
    return random.getrandbits(32) if is_wanted() else zlib.crc32(name.encode())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Where a test's random numbers begin; shown when it fails."""
    chosen = seed_for(request.node.nodeid)
    print(f"seed: {chosen}")  # noqa: T201
    return chosen


_constants_of_modules = providers._get_local_constants


def _constants() -> Constants:
    """Return numbers and texts that stand in our modules, for Hypothesis to try; none in the gate.

    Which modules are loaded depends on the tests that ran before, and so would all examples.
    """
    return _constants_of_modules() if is_wanted() else Constants()


providers._get_local_constants = _constants
