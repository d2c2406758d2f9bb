"""The section `forecast` of a model spec: the forecasts that `skill` compares with later measurements."""

from __future__ import annotations

import hashlib
import json
from typing import Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from jobs.core.times import parse_duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Number, SpecSection, check_duration


class ForecastSkill(SpecSection):
    """The horizons of the forecasts from each estimate, and which later rows are compared with the forecasts."""

    horizons: list[str] = Field(min_length=1, description="how far ahead to forecast, such as [1h, 6h, 1d]")
    tolerance: str | None = Field(
        default=None,
        description="a row up to this long before or after a horizon is compared with it; null: at exactly its time",
    )
    step: str | None = Field(
        default=None,
        description="for a process with one step a row, the duration of a step; horizons are multiples of it",
    )
    probability: Number = Field(
        default=0.9, gt=0.0, lt=1.0, description="with which a measurement lies in the forecast's interval"
    )
    watermark: str = Field(
        default="10min",
        description="how far an estimate may lag the newest event time and still be compared",
    )
    watermark_policy: Literal["min", "max"] = Field(
        default="min",
        description="a row may not be older than `watermark` before the newest event time (min), or before the time of "
        "the newest forecast (max), by which forecasts wait for less long",
    )

    _snapshot: str | None = PrivateAttr(None)

    @property
    def snapshot(self) -> str | None:
        """Return the snapshot whose parameters forecasts use; None means the snapshot that began each generation."""
        return self._snapshot

    def with_snapshot(self, snapshot: str | None) -> Self:
        """Return a copy of the section, with another definition, whose forecasts use a snapshot's parameters."""
        copy = self.model_copy()
        copy._snapshot = snapshot
        return copy

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for place, horizon in enumerate(self.horizons):
            check_duration(horizon, f"horizons[{place}]")
        for place, horizon in enumerate(self.horizons):
            if parse_duration_us(horizon) in self.lengths[:place]:
                raise invalid(f"'{horizon}' is given twice", "give each horizon once", f"horizons[{place}]")
        for field in ("tolerance", "step", "watermark"):
            check_duration(getattr(self, field), field)
        if self.tolerance is not None and self.tolerance_us >= min(self.lengths):
            raise invalid(
                "reaches back to the estimate itself", "give less than the shortest horizon", "tolerance"
            )
        reach = max(self.lengths) + self.tolerance_us
        if self.watermark_policy == "max" and reach > parse_duration_us(self.watermark):
            raise invalid(
                "max leaves every row late, as the newest forecast is further ahead than `watermark`",
                "write min, or a watermark that is at least the longest horizon and the tolerance",
                "watermark_policy",
            )
        if self.step is not None:
            for place, length in enumerate(self.lengths):
                if length % parse_duration_us(self.step):
                    raise invalid(
                        f"is not a multiple of the step {self.step}", "give a multiple", f"horizons[{place}]"
                    )
        return self

    @property
    def lengths(self) -> list[int]:
        """Return the horizons in microseconds."""
        return [parse_duration_us(one) for one in self.horizons]

    @property
    def tolerance_us(self) -> int:
        """Return the tolerance in microseconds."""
        return 0 if self.tolerance is None else parse_duration_us(self.tolerance)

    @property
    def watermark_interval(self) -> str:
        """Return the watermark's delay in Spark's syntax."""
        return f"{parse_duration_us(self.watermark)} microseconds"

    def definition(self) -> str:
        """Return a short hash of the section, which names the checkpoint and is in every output row."""
        with_snapshot = {} if self._snapshot is None else {"snapshot": self._snapshot}
        # Definitions of releases without a watermark policy lack this field, so its default value is left out.
        given = self.model_dump(exclude={"watermark_policy"} if self.watermark_policy == "min" else None)
        text = json.dumps({**given, **with_snapshot}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
