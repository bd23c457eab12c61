"""The list of seeded faults fits the sources and the tests there are."""

from __future__ import annotations

import importlib

import pytest

from tests.seeded_faults import FAULTS, REPOSITORY, Fault, failed, problem


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_seeded(fault: Fault) -> None:
    """Its text is in its file, once; with the other text the file is still Python; its tests are there."""
    assert problem(fault, REPOSITORY) is None
    before = (REPOSITORY / fault.file).read_text()
    after = before.replace(fault.old, fault.new)
    assert after != before
    compile(after, fault.file, "exec")
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")
        assert (REPOSITORY / file).exists()
        there: object = None
        if names:  # they may be inherited
            there = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for name in names:
            there = getattr(there, name)


def test_each_fault_has_a_name_and_a_module_of_its_own() -> None:
    """So that every one of them is about other tests."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({fault.file for fault in FAULTS}) == len(FAULTS)


def test_the_first_failed_test_is_named() -> None:
    """With its parameters, blanks and all, and without the reason."""
    output = "..F\nFAILED tests/a.py::test_b[redis exactly once] - assert 1 == 2 - no\nFAILED tests/c.py::d\n"

    assert failed(output) == "tests/a.py::test_b[redis exactly once]"
    assert failed("ERROR tests/a.py::test_b\n") == "tests/a.py::test_b"
