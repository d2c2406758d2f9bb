"""The sections of a model spec on time (order of rows, duplicates, expiry of keys), and on the limit of quarantine."""

from __future__ import annotations

from datetime import UTC
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobs.core.times import TimeParser, parse_duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Duration, Number, SpecSection, check_duration


class Duplicates(SpecSection):
    """How rows with the same key and time, or with the same key and id, are treated as duplicates."""

    action: Literal["quarantine", "drop"] = "quarantine"
    """quarantine them, or drop them (only counted)"""
    id: str | None = None
    """column of a text or whole number that a row and its repetitions share, such as message_id; null: rows of one key
    and time are repetitions
    """
    within: Duration | None = None
    """with id, how far apart the event times of a row and its repetition may be, such as 1h; ids are remembered for
    that long
    """

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.id is not None and self.within is None:
            raise invalid(
                "is missing",
                "give how far apart a row and its repetition may be, such as within: 1h",
                "within",
            )
        if self.id is None and self.within is not None:
            raise invalid("is for an id", "remove it, or name the column: id: message_id", "within")
        return self

    @property
    def within_us(self) -> int:
        """Return the maximum difference, in microseconds, between the times of a row and of its repetition."""
        return 0 if self.within is None else parse_duration_us(self.within)

    def meaning(self) -> dict[str, Any] | bool:
        """Return the options on which the stored state depends; the action on repetitions is not one of them."""
        return True if self.id is None else {"id": self.id, "within": self.within_us}


class Expiry(SpecSection):
    """When a key without new rows expires, and what happens then."""

    after: Duration
    """a key expires when its rows are further apart than this, such as 30d; a silent key does once the clock has passed
    that time
    """
    clock: Literal["event", "processing"] = "event"
    """event: event times and the watermark; processing: the machine's time at the arrival of rows"""
    returns: Literal["prior", "archive"] = "prior"
    """where a returning key begins: prior, the model's initial distribution; archive, its last state"""

    @property
    def after_us(self) -> int:
        """Return the duration in microseconds after which a key without new rows expires."""
        return parse_duration_us(self.after)


class Order(SpecSection):
    """The order in which the stream applies the rows of a key."""

    kind: Literal["as-arrived", "strict", "replay"] = "as-arrived"
    """as-arrived: each micro-batch's rows in event-time order (`late` decides on older ones); strict: rows wait until
    the watermark has passed them, and are applied in full event-time order; replay: rows are applied at once, and
    replayed where late ones belong between them, with corrected estimates
    """
    delay: Duration | None = None
    """how far the watermark lags the newest event time, such as 15min: the most by which a row may be late; required
    with strict, 0 by default otherwise
    """
    patience: Duration | None = None
    """with strict, a running stream applies all waiting rows when no row has come for this long by the machine's clock,
    such as 1h; null: it waits for rows
    """
    rows: int | None = Field(default=None, ge=1, le=10_000)
    """with replay, number of rows of each key that are kept: the most that may overtake a late row"""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.kind != "strict" and self.patience is not None:
            raise invalid("is for order.kind: strict", "remove it, or write kind: strict", "patience")
        if self.kind == "replay" and self.rows is None:
            raise invalid(
                "is missing", "give how many rows may overtake a late one, such as rows: 20", "rows"
            )
        if self.kind != "replay" and self.rows is not None:
            raise invalid("is for order.kind: replay", "remove it, or write kind: replay", "rows")
        if self.kind == "strict" and self.delay is None:
            raise invalid("is missing", "give by how much rows may be late, such as delay: 15min", "delay")
        return self

    @property
    def delay_us(self) -> int:
        """Return the delay in microseconds."""
        return 0 if self.delay is None else parse_duration_us(self.delay)

    @property
    def patience_us(self) -> int | None:
        """Return the patience in microseconds."""
        return None if self.patience is None else parse_duration_us(self.patience)

    @property
    def waits(self) -> bool:
        """Return whether rows wait for the watermark before they are applied."""
        return self.kind == "strict"

    def meaning(self) -> dict[str, Any]:
        """Return the options on which the stored state depends; empty for the order of arrival.

        The stored state does not depend on the delay.
        """
        if self.kind == "as-arrived":
            return {}
        rows = {} if self.rows is None else {"rows": self.rows}
        # Spark's operator is a different one if a patience is set, but the length of the patience may change.
        return {"kind": self.kind, **rows, **({} if self.patience is None else {"patience": True})}


class TimeRange(SpecSection):
    """The times that rows may have; rows with other times are rejected."""

    latest: str | None = "1d"
    """how far after its landing the time of a row may lie, such as 1d or 2h; null or none: however far"""
    earliest: str | None = None
    """the first time that a row may have, such as 1990-01-01; null: any time"""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.latest is not None and self.latest != "none":
            check_duration(self.latest, "latest")
        if self.earliest is not None and TimeParser(None, UTC)(self.earliest) is None:
            raise invalid(f"'{self.earliest}' is not a time", "write one such as 1990-01-01", "earliest")
        return self

    @property
    def latest_us(self) -> int | None:
        """Return the maximum time from a row's landing to its event time, in microseconds; None means no limit."""
        return None if self.latest in (None, "none") else parse_duration_us(self.latest)

    @property
    def earliest_us(self) -> int | None:
        """Return the earliest allowed time in microseconds since 1970; None means no limit."""
        return None if self.earliest is None else TimeParser(None, UTC)(self.earliest)


class QuarantineLimit(SpecSection):
    """The share of rejected rows above which a micro-batch, or a file, fails instead of going to quarantine."""

    fail_above: Number = Field(ge=0, lt=1)
    """share of the rows of a micro-batch, or of a landed file, that may be quarantined, such as 0.1; above it none of
    the rows is written and the command fails
    """
    fail_from: int = Field(default=1, ge=1)
    """least number of quarantined rows at once for the share to count"""
