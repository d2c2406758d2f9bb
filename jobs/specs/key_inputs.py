"""The section of a model spec that names a table of inputs: numbers that belong to a key, not to a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from jobs.specs.problems import invalid
from jobs.specs.sections import Number, Section


class Inputs(Section):
    """A Delta table with a row a key, whose numbers stand in the model where a control column could."""

    table: str | None = Field(
        default=None,
        description="the table's path below the warehouse, or whole (/data/sensors); null: inputs/<name>",
    )
    key: list[str] | None = Field(
        default=None,
        min_length=1,
        description="key columns that the table has a row for each value of; null: all of the model's",
    )
    columns: dict[str, str] = Field(
        min_length=1,
        description="what each input is called in the model, and the table's column of it, such as {noise: noise_db}",
    )
    defaults: dict[str, Number] | None = Field(
        default=None,
        description="numbers for keys that the table has no row for; null: their rows go to quarantine",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.defaults is not None and set(self.defaults) != set(self.columns):
            raise invalid(
                "names other inputs than columns",
                f"give one for each of {', '.join(self.columns)}",
                "defaults",
            )
        return self

    def check_names(self, key: Sequence[str]) -> None:
        """Refuse key columns that the model does not have.

        Raises:
            ValueError: as a spec's own checks do.
        """
        for place, name in enumerate(self.key or ()):
            if name not in key:
                raise invalid(
                    f"'{name}' is no key column", f"choose from {', '.join(key)}", f"inputs.key[{place}]"
                )
