"""The section `retention` of a model spec: how long old snapshots, generations and rows are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from jobs.core.times import parse_duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Duration, SpecSection

DAY_US = 86_400_000_000


def parse_span(text: str) -> timedelta:
    """Return a duration in this section as a timedelta."""
    return timedelta(microseconds=parse_duration_us(text))


def _check_age(text: str) -> str:
    """Refuse a duration so short that running commands would lose their data."""
    if parse_duration_us(text) < DAY_US:
        raise invalid("is less than a day", "write 1d or more: a command may still use it")
    return text


Age = Annotated[Duration, AfterValidator(_check_age)]


class Kept(SpecSection):
    """Which items of a sequence are kept: the newest items, and the items younger than an age."""

    newest: int = Field(default=10, ge=0)
    """number of the newest that are kept, at any age"""
    age: Age = "30d"
    """those younger than this are kept, in any number; at least 1d"""

    @property
    def span(self) -> timedelta:
        """Return the age at which an item may be removed."""
        return parse_span(self.age)


class KeptGenerations(Kept):
    """Which retired generations are kept; the defaults differ, because their checkpoints are larger than snapshots."""

    newest: int = Field(default=1, ge=0)
    """number of the newest that are kept, at any age"""


class Retention(SpecSection):
    """The data that `maintain` keeps; `maintain` never removes data that are still needed."""

    snapshots: Kept = Field(default_factory=Kept)
    """{newest: 10, age: 30d}; the last good one is always kept"""
    generations: KeptGenerations = Field(default_factory=KeptGenerations)
    """retired ones, their checkpoints and reports: {newest: 1, age: 30d}; a rollback's target stays"""
    quarantine: Age = "90d"
    """how long a quarantined row is kept after it was replayed or discarded"""
    progress: Age = "90d"
    """how long the record of a micro-batch is kept"""
    estimates: bool = False
    """true: estimates outside the live ones are removed with their generation's checkpoint"""
    definitions: Age = "90d"
    """how long rows and checkpoint of a former definition of `monitor` or `forecast` are kept after its last
    micro-batch
    """
    windows: Age | None = None
    """how far a window of `monitor` may lag the newest one, by event time, and be kept; null: no limit"""
    skill: Age | None = None
    """how far a forecast of `skill` may lag the newest one, by event time, and be kept; null: no limit"""
    forecasts: Age | None = None
    """how far a row of `forecasts/<model>` may lag the newest one, by event time; null: no limit"""
    files: Duration = "7d"
    """how long VACUUM keeps files that no table needs any more; Delta refuses less than 7d"""
