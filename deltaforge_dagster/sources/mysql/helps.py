"""Values that a kernel cannot write: Arrow and Python turn them into JSON text, many at a time.

`scan` has noted them in the order in which `rows` meets them. Floating point numbers are written by
Arrow's cast, whose text is the shortest that reads back as the same number; other character sets
are read by Python's codecs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.sources.kernel import Bytes, Longs, read_only
from deltaforge_dagster.sources.mysql.charsets import CHARSETS
from deltaforge_dagster.sources.mysql.json_binary import json_text
from deltaforge_dagster.sources.mysql.layout import HELP_END, HELP_KIND, HELP_START
from deltaforge_dagster.sources.mysql.values import HELP_DOUBLE, HELP_FLOAT, HELP_JSON, HELP_TEXT

_FLOATS: dict[int, npt.DTypeLike] = {HELP_FLOAT: "<f4", HELP_DOUBLE: "<f8"}


def help_texts(source: Bytes, helps: Longs) -> tuple[Longs, Bytes]:
    """Return the JSON texts of the values of `helps`: n + 1 places, and the bytes between them.

    Raises:
        CorruptLog: A JSON value does not follow its format.
    """
    kinds = helps[:, HELP_KIND]
    parts: list[pa.Array[Any]] = []
    lines: list[npt.NDArray[np.int64]] = []
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        lines.append(chosen)
        parts.append(_texts(int(kind), source, helps[chosen, HELP_START], helps[chosen, HELP_END]))
    if not parts:
        return np.zeros(1, np.int64), read_only(b"")
    texts = parts[0]
    if len(parts) > 1:
        places = np.empty(len(helps), np.int64)
        places[np.concatenate(lines)] = np.arange(len(helps))
        texts = pa.concat_arrays(parts).take(pa.array(places))  # type: ignore[arg-type]
    _, ends, data = texts.buffers()
    if ends is None or data is None:
        return np.zeros(len(helps) + 1, np.int64), read_only(b"")
    bounds = np.frombuffer(memoryview(ends), np.int64)[texts.offset : texts.offset + len(helps) + 1]
    return bounds.copy(), read_only(memoryview(data))


def _texts(kind: int, source: Bytes, starts: Longs, ends: Longs) -> pa.Array[Any]:
    """Return the texts of values of one kind."""
    float_type = _FLOATS.get(kind)
    if float_type is not None:
        raw = source[starts[:, None] + np.arange(np.dtype(float_type).itemsize)]
        numbers: pa.Array[Any] = pa.array(raw.view(float_type)[:, 0])
        return numbers.cast(pa.large_string())
    write = json_text if kind == HELP_JSON else _reader(CHARSETS[kind - HELP_TEXT].codec)
    return pa.array(
        [write(source[start:end].tobytes()) for start, end in zip(starts, ends, strict=True)],
        pa.large_string(),
    )


def _reader(codec: str) -> Callable[[bytes], str]:
    """Return what turns text in this codec into JSON text."""

    def read(content: bytes) -> str:
        try:
            return json.dumps(content.decode(codec), ensure_ascii=False)
        except UnicodeDecodeError:
            return f'{{"_base64":"{base64.b64encode(content).decode()}"}}'

    return read
