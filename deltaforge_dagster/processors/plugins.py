"""Create processors of installed packages, and check their output.

A package's entry point (`config.processors`) is a class, or any callable, that takes the `id` of
the block and its `config` as keyword arguments and returns a `Processor` (`processors.base`). If it
has an attribute `Config`, a pydantic model, `config` is an instance of that instead of a
dictionary, and errors in the block are found when the file is checked. The factory raises
`SpecError` if it cannot use the configuration.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from deltaforge_dagster.config.processors import CustomProcessor, processor_types
from deltaforge_dagster.errors import DeltaforgeError, ProcessorFailed, SpecError
from deltaforge_dagster.processors.base import Processor, checked


def custom(block: CustomProcessor) -> Processor:
    """Return the processor of a block.

    Raises:
        SpecError: The package is not installed on this machine, or rejects the block.
    """
    where = f"processor {block.id}: {block.type}"
    entry_point = processor_types().get(block.type)
    if entry_point is None:
        raise SpecError(f"{where}: no package that is installed here provides it")
    try:
        factory = entry_point.load()
        model = getattr(factory, "Config", None)
        config: object = dict(block.config)
        if isinstance(model, type) and issubclass(model, BaseModel):
            config = model.model_validate(config)
        return _CheckedProcessor(block.id, factory(id=block.id, config=config))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        messages = [
            f"config.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems
        ]
        raise SpecError(f"{where}: {'; '.join(messages)}") from None
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    except Exception as error:
        raise SpecError(f"{where}: cannot be created: {type(error).__name__}: {error}") from error


class _CheckedProcessor:
    """Wraps a processor, converts its exceptions to `ProcessorFailed`, and checks its output."""

    def __init__(self, name: str, processor: Processor) -> None:
        self._name = name
        self._processor = processor

    @property
    def counts(self) -> Counter[str]:
        return self._processor.counts

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        try:
            returned = self._processor.process(frame)
        except DeltaforgeError:
            raise
        except Exception as error:  # noqa: BLE001 - the package's code may raise anything
            # Not chained: the message may contain a value of a row.
            raise ProcessorFailed(f"processor {self._name}: {type(error).__name__}") from None
        return checked(self._name, frame, returned)

    def close(self) -> None:
        self._processor.close()
