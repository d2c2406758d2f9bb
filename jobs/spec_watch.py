"""The sections of a model spec that say when a stream or a landing is to be stopped instead of going on."""

from __future__ import annotations

from pydantic import Field

from jobs.spec_sections import Number, Section


class QuarantineLimit(Section):
    """How much may go to quarantine before a micro-batch, or a file, fails as a whole instead."""

    fail_above: Number = Field(
        ge=0,
        lt=1,
        description="part of the rows of a micro-batch, or of a landed file, that may be quarantined, such as 0.1; "
        "where it is more, nothing of them is written and the command fails",
    )
    fail_from: int = Field(
        default=1, ge=1, description="rows that have to be quarantined at once for the part to count"
    )
