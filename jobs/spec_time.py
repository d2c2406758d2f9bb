"""The sections of a model spec that say in which order rows are applied, and what time does to rows and keys."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobs.spec_errors import wrong
from jobs.spec_sections import Section, check_duration
from jobs.times import duration_us


class Order(Section):
    """The order in which the stream applies the rows of a key."""

    kind: Literal["as-arrived", "strict"] = Field(
        default="as-arrived",
        description="as-arrived: each micro-batch's rows in event-time order (`late` says what becomes of older ones); "
        "strict: rows wait until the watermark has passed them, and are applied in full event-time order",
    )
    delay: str | None = Field(
        default=None,
        description="how far the watermark stays behind the newest event time, such as 15min: the most by which a row "
        "may be late",
    )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_duration(self.delay, "delay")
        if self.kind == "strict" and self.delay is None:
            raise wrong("is missing", "say by how much rows may be late, such as delay: 15min", "delay")
        if self.kind == "as-arrived" and self.delay is not None:
            raise wrong("is for order.kind: strict", "remove it, or write kind: strict", "delay")
        return self

    @property
    def delay_us(self) -> int:
        """Return the delay in microseconds."""
        return 0 if self.delay is None else duration_us(self.delay)

    @property
    def waits(self) -> bool:
        """Tell if rows wait for the watermark."""
        return self.kind == "strict"

    def meaning(self) -> dict[str, Any]:
        """Return what gives the stored state its meaning; empty for the plain order. The delay may change."""
        return {} if self.kind == "as-arrived" else {"kind": self.kind}
