"""The section of a model spec that says how long what a model leaves behind is kept."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, model_validator

from jobs.core.times import duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Section

DAY_US = 86_400_000_000


def span_of(text: str) -> timedelta:
    """Return a duration of this section."""
    return timedelta(microseconds=duration_us(text))


def _check(text: str, field: str, least: int = DAY_US) -> None:
    """Refuse what is no duration, and one so short that a command which is still at it would lose its ground."""
    try:
        found = duration_us(text)
    except ValueError as error:
        raise invalid(str(error), "write a number and one of h, d, w, such as 90d or 12w", field) from error
    if found < least:
        raise invalid("is less than a day", "write 1d or more: a command may still be at work with it", field)


class Kept(Section):
    """What is kept of things that come one after the other: the newest, and those that are young."""

    newest: int = Field(default=10, ge=0, description="so many of the newest are kept, however old they are")
    age: str = Field(
        default="30d", description="those younger than this are kept, however many they are; at least 1d"
    )

    @property
    def span(self) -> timedelta:
        """Return the age from which on one may go."""
        return timedelta(microseconds=duration_us(self.age))

    @model_validator(mode="after")
    def _long_enough(self) -> Kept:
        _check(self.age, "age")
        return self


class KeptGenerations(Kept):
    """The same of retired generations, whose checkpoints are larger than snapshots."""

    newest: int = Field(default=1, ge=0, description="so many of the newest are kept, however old they are")


class Retention(Section):
    """What `maintain` leaves, and what it takes away; it never takes what anything still needs."""

    snapshots: Kept = Field(
        default_factory=Kept, description="{newest: 10, age: 30d}; the last good one is always kept"
    )
    generations: KeptGenerations = Field(
        default_factory=KeptGenerations,
        description="retired ones, their checkpoints and reports: {newest: 1, age: 30d}; the one to roll back to stays",
    )
    quarantine: str = Field(
        default="90d", description="how long a quarantined row is kept after it was replayed or discarded"
    )
    progress: str = Field(default="90d", description="how long the record of a micro-batch is kept")
    estimates: bool = Field(
        default=False,
        description="true: estimates that are no part of the live ones go with their generation's checkpoint",
    )
    definitions: str = Field(
        default="90d",
        description="how long what a former definition of `monitor` or `forecast` has left is kept after its last "
        "micro-batch: its rows and its checkpoint",
    )
    windows: str | None = Field(
        default=None,
        description="how long a window of `monitor` is kept behind the newest one, by event time; null: for good",
    )
    skill: str | None = Field(
        default=None,
        description="how long a forecast of `skill` is kept behind the newest one, by event time; null: for good",
    )
    files: str = Field(
        default="7d",
        description="how long VACUUM leaves files that no table needs any more; Delta refuses less than 7d",
    )

    @model_validator(mode="after")
    def _long_enough(self) -> Retention:
        for field in ("quarantine", "progress", "definitions", "windows", "skill"):
            if getattr(self, field) is not None:
                _check(getattr(self, field), field)
        _check(self.files, "files", least=0)
        return self
