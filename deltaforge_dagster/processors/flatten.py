"""The `flatten` processor: nested objects in row images become top-level columns.

`{"id":1,"address":{"city":"Oslo","geo":{"lat":59.9}}}` becomes
`{"id":1,"address__city":"Oslo","address__geo__lat":59.9}`. Both images are flattened. An image
without nesting stays byte-identical; in the others every value keeps its spelling. The
representations of bytes and of unchanged TOAST values, `{"_base64":...}` and `{"_unchanged":true}`,
count as values, not as objects.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pyarrow as pa

from deltaforge_dagster.config.processors import FlattenProcessor
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.exact_json import Json, dumps, loads

_WRAPPERS = frozenset({"_base64", "_base64_json", "_unchanged"})


class Flatten:
    """One `flatten` processor; it counts nothing."""

    def __init__(self, config: FlattenProcessor) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of the change frame with flat images.

        Raises:
            ProcessorFailed: Two values have the same name, and `on_collision` is `error`.
        """
        for name in ("before", "after"):
            index = frame.schema.get_field_index(name)
            column = frame.column(index)
            texts = cast("list[str | None]", column.to_pylist())
            flat = [text if text is None or _is_flat(text) else self._flat(text) for text in texts]
            if any(new is not old for new, old in zip(flat, texts, strict=True)):
                array: pa.Array[Any] = pa.array(flat, pa.string())
                frame = frame.set_column(index, frame.schema.field(index), array)
        return frame

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _flat(self, text: str) -> str:
        image = loads(text)
        if not isinstance(image, dict):
            return text
        flat: dict[str, Json] = {}
        for name, value in image.items():
            self._put(flat, name, value, 0)
        return dumps(flat)

    def _put(self, flat: dict[str, Json], name: str, value: Json, depth: int) -> None:
        """Add a value at `depth`, or the values nested in it, to the flat image."""
        config = self._config
        if isinstance(value, dict) and not _is_wrapper(value):
            if not value:
                self._put_empty(flat, name, value, config.empty_object)
            elif config.max_depth is None or depth < config.max_depth:
                for below, nested in value.items():
                    self._put(flat, f"{name}{config.separator}{below}", nested, depth + 1)
            else:
                self._put_leaf(flat, name, value)
        elif isinstance(value, list) and not value:
            self._put_empty(flat, name, value, config.empty_list)
        elif isinstance(value, list) and config.lists == "index":
            for index, nested in enumerate(value):
                self._put(flat, f"{name}{config.separator}{index}", nested, depth + 1)
        else:
            self._put_leaf(flat, name, value)

    def _put_empty(self, flat: dict[str, Json], name: str, value: Json, policy: str) -> None:
        if policy != "drop":
            self._put_leaf(flat, name, value if policy == "preserve" else None)

    def _put_leaf(self, flat: dict[str, Json], name: str, value: Json) -> None:
        if name in flat:
            if self._config.on_collision == "error":
                raise ProcessorFailed(
                    f"processor {self._config.id}: flatten: key collision on '{name}'"
                )
            if self._config.on_collision == "first":
                return
        flat[name] = value


def _is_flat(text: str) -> bool:
    """Return whether an object has no nested object or list, and no string with `{` or `[`."""
    return "[" not in text and text.find("{", 1) < 0


def _is_wrapper(value: dict[str, Json]) -> bool:
    return len(value) == 1 and not _WRAPPERS.isdisjoint(value)
