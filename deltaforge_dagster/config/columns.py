"""`spec.engine.columns`: what is hidden of rows before anything is written."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import Block, Count, Text, environment_filled, resolved

# A table as in `source.config.tables`, the last dot, and a column of it.
_COLUMN_PATTERN = re.compile(
    r"""(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^.*%]+[*%]?|[*%]) )? \. (?:[^.*%]+[*%]?|[*%])""",
    re.VERBOSE,
)
_LEAST_SALT = 16


def _column_pattern(text: str) -> str:
    if not _COLUMN_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a column pattern (write schema.table.column or table.column, where a part may "
            "end in `*` or `%` for any rest, and has no other wildcard)"
        )
    return text


Pattern = Annotated[Text, AfterValidator(_column_pattern)]
"""`schema.table.column`, or `table.column` for that table in any database or schema."""

_MaskText = Annotated[str, AfterValidator(environment_filled)]


class HashedColumns(Block):
    """Columns whose values become salted hashes: equal values stay equal, and say nothing else."""

    columns: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Patterns of the columns whose values become the SHA-256 of salt and value."""
    salt: SecretStr
    """A secret of at least 16 characters that is hashed before each value. Usually a variable of the environment."""

    @field_validator("salt")
    @classmethod
    def _check_salt(cls, salt: SecretStr) -> SecretStr:
        if len(resolved(salt.get_secret_value())) < _LEAST_SALT:
            raise ValueError(
                f"is shorter than {_LEAST_SALT} characters, so that values could be found by "
                "trying (take a long random text)"
            )
        return salt

    @field_serializer("salt")
    def _mask_salt(self, salt: SecretStr) -> str:
        del salt
        return "***"


class ColumnOptions(Block):
    """What is hidden of rows at capture (docs/columns.md)."""

    exclude: tuple[Pattern, ...] = ()
    """Patterns of columns that events do not have."""
    include: tuple[Pattern, ...] = ()
    """Patterns of columns: of the tables that they name, events have only these columns and the key."""
    hash: HashedColumns | None = None
    """Columns whose values are replaced by salted hashes."""
    mask: Mapping[Pattern, _MaskText] = {}
    """Patterns of columns, each with the text that stands in place of every value."""
    truncate: Mapping[Pattern, Count] = {}
    """Patterns of columns of text, each with the number of characters that stay of a value."""

    @model_validator(mode="after")
    def _check_repeated(self) -> ColumnOptions:
        seen: dict[str, str] = {}
        for action, patterns in self.patterns().items():
            for pattern in patterns:
                other = seen.setdefault(pattern, action)
                if other != action:
                    raise ValueError(
                        f"{pattern} is in {other} and in {action} (a column has one of them)"
                    )
        return self

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Return the patterns of each action that takes something away, by its name in the file."""
        return {
            "exclude": self.exclude,
            "mask": tuple(self.mask),
            "hash": self.hash.columns if self.hash else (),
            "truncate": tuple(self.truncate),
        }

    def salt_digest(self) -> str:
        """Return what tells this salt from others without telling it; empty without one."""
        if self.hash is None:
            return ""
        salt = self.hash.salt.get_secret_value().encode()
        return hmac.new(salt, b"spec.engine.columns.hash.salt", hashlib.sha256).hexdigest()
