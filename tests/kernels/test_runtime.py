"""Kernels are compiled at their first call, alone and inside of others, and are plain Python on request."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deltaforge_dagster.kernels import runtime
from deltaforge_dagster.kernels.runtime import Bytes, kernel, read_only

COPY = """
import sys
import numpy as np
from deltaforge_dagster.kernels import json_strings, message_text
from deltaforge_dagster.kernels.runtime import copy, read_only
assert "numba" not in sys.modules
out = np.zeros(9, np.uint8)
end = copy(read_only(b"change"), 1, 4, out, 2)
assert "numba" in sys.modules
print(end, bytes(out))
"""


@pytest.mark.parametrize("variable", ["", "NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK"])
def test_copy(variable: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Numba is imported by the first call, and the bytes are the same however the kernel runs."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    if variable:
        environment[variable] = "1"

    done = subprocess.run(
        [sys.executable, "-c", COPY], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"5 {bytes(2) + b'han' + bytes(4)!r}\n"


@kernel
def _first(data: Bytes) -> int:
    """Return the first byte."""
    return int(np.int64(data[0]))


@kernel
def _twice(data: Bytes) -> int:
    """Return twice the first byte."""
    return 2 * _first(data)


def test_a_kernel_that_others_call() -> None:
    """Threads that make the first calls at the same time, of a kernel and of one that calls it, get what they ask for."""
    data = read_only(b"!")
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda one: one(data), [_first, _twice] * 8))

    assert told == [33, 66] * 8


def test_a_kernel_keeps_its_name() -> None:
    """It has the name and the text of its function, and is pickled by name, as Spark's tasks need it."""
    assert runtime.copy.__name__ == "copy"
    assert (runtime.copy.__doc__ or "").startswith("Copy `source[start:end]`")
    assert pickle.loads(pickle.dumps(runtime.copy)) is runtime.copy
