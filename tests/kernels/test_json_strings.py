from __future__ import annotations

import base64
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_strings import is_utf_8, write_base64, write_utf_8
from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import read_only
from tests.chance import examples

NEAR_UTF_8 = st.lists(
    st.sampled_from([0x00, 0x22, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2])
    | st.sampled_from([0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF]),
    max_size=8,
).map(bytes)


def is_text(content: bytes) -> bool:
    """Say what Python says."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "replace")))
def test_text_is_written_as_json_does(content: bytes) -> None:
    """UTF-8 becomes the JSON string that Python writes; nothing else is taken for it."""
    out = np.zeros(6 * len(content) + 3, np.uint8)
    end = write_utf_8(read_only(content), 0, len(content), out, 1)

    if is_text(content):
        assert out[1:end].tobytes().decode() == json.dumps(content.decode(), ensure_ascii=False)
    else:
        assert end == INVALID


@settings(max_examples=examples(1000))
@given(NEAR_UTF_8)
def test_utf_8_is_what_python_takes_for_it(content: bytes) -> None:
    """Overlong forms, surrogates, numbers beyond Unicode and cut characters are not UTF-8."""
    assert is_utf_8(read_only(content), 0, len(content)) == is_text(content)


@given(st.binary(max_size=40))
def test_base64_is_the_standard_s(content: bytes) -> None:
    """Bytes of any length become Base64 with padding, inside the bound of the kernel."""
    out = np.zeros(2 * len(content) + 18, np.uint8)
    end = write_base64(read_only(content), 0, len(content), out, 0)

    assert json.loads(out[:end].tobytes()) == {"_base64": base64.b64encode(content).decode()}
