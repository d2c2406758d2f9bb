"""The section of a model spec that says which forecasts `skill` compares with what was measured later."""

from __future__ import annotations

import hashlib
import json
from typing import Self

from pydantic import Field, model_validator

from jobs.core.times import duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Number, Section, check_duration


class ForecastSkill(Section):
    """How far ahead measurements are forecast from each estimate, and what of later rows is compared with that."""

    horizons: list[str] = Field(min_length=1, description="how far ahead, such as [1h, 6h, 1d]")
    tolerance: str | None = Field(
        default=None,
        description="a row counts for a horizon that comes up to so long before or after it; null: at its very time",
    )
    step: str | None = Field(
        default=None,
        description="with a process that takes one step a row, the time of a step; horizons are multiples of it",
    )
    probability: Number = Field(
        default=0.9, gt=0.0, lt=1.0, description="with which a measurement is between the interval's bounds"
    )
    watermark: str = Field(
        default="10min",
        description="how long behind the newest event time an estimate still finds what it is compared with",
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for place, horizon in enumerate(self.horizons):
            check_duration(horizon, f"horizons[{place}]")
        for place, horizon in enumerate(self.horizons):
            if duration_us(horizon) in self.lengths[:place]:
                raise invalid(f"'{horizon}' is there twice", "name each horizon once", f"horizons[{place}]")
        for field in ("tolerance", "step", "watermark"):
            check_duration(getattr(self, field), field)
        if self.tolerance is not None and self.tolerance_us >= min(self.lengths):
            raise invalid(
                "reaches back to the estimate itself", "give less than the first horizon", "tolerance"
            )
        if self.step is not None:
            for place, length in enumerate(self.lengths):
                if length % duration_us(self.step):
                    raise invalid(
                        f"is not a multiple of the step {self.step}", "give one", f"horizons[{place}]"
                    )
        return self

    @property
    def lengths(self) -> list[int]:
        """Return the horizons in microseconds."""
        return [duration_us(one) for one in self.horizons]

    @property
    def tolerance_us(self) -> int:
        """Return the tolerance in microseconds."""
        return 0 if self.tolerance is None else duration_us(self.tolerance)

    @property
    def watermark_interval(self) -> str:
        """Return the watermark's delay as Spark reads it."""
        return f"{duration_us(self.watermark)} microseconds"

    def definition(self) -> str:
        """Return a short name of what is compared: what is kept under it means this and nothing else."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
