"""The section `inputs` of a model spec: a table of numbers that belong to a key, not to a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from jobs.specs.problems import invalid, suggest_key
from jobs.specs.sections import Number, SpecSection


class Inputs(SpecSection):
    """A Delta table with one row for each key, whose numbers the model uses like control columns."""

    table: str | None = Field(
        default=None,
        description="the table's path below the warehouse, or absolute (/data/sensors); null: inputs/<name>",
    )
    key: list[str] | None = Field(
        default=None,
        min_length=1,
        description="key columns for whose values the table has rows; null: all of the model's",
    )
    columns: dict[str, str] = Field(
        min_length=1,
        description="each input's name in the model and its column in the table, such as {noise: noise_db}",
    )
    defaults: dict[str, Number] | None = Field(
        default=None,
        description="numbers for keys without a row in the table; null: their rows go to quarantine",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.defaults is not None and set(self.defaults) != set(self.columns):
            raise invalid(
                "names other inputs than columns",
                f"give a default for each of {', '.join(self.columns)}",
                "defaults",
            )
        return self

    def check_names(self, key: Sequence[str]) -> None:
        """Check that the key columns belong to the model's key.

        Raises:
            ValueError: the error of `problems.invalid`.
        """
        if not key:
            remedy = "write the numbers into the entries, or name `key`"
            raise invalid("belongs to keys, and the model has no key columns", remedy, "inputs")
        for place, name in enumerate(self.key or ()):
            if name not in key:
                raise invalid(f"'{name}' is not a key column", suggest_key(key), f"inputs.key[{place}]")
