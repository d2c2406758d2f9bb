"""The sections of a model spec that change how a filter takes a row."""

from __future__ import annotations

from pydantic import Field

from jobs.spec_sections import Number, Observation, Process, Section, Unscented


class Gate(Section):
    """Leave out rows that are too far from what was predicted."""

    probability: Number | None = Field(
        default=None, description="let in what this part of good rows stays within, such as 0.99 (chi-square)"
    )
    threshold: Number | None = Field(
        default=None, description="or: the largest NIS that is let in, such as 9.2"
    )
    limit: int | None = Field(
        default=None, ge=1, description="after so many gated rows in a row the next is let in; null: never"
    )


class StudentT(Section):
    """Measurement noise with the heavy tails of Student's t, one weight for all components of a row."""

    degrees: Number = Field(description="degrees of freedom, such as 4; the fewer, the heavier the tails")
    iterations: int = Field(default=10, ge=1, description="steps of the variational update")


class Huber(Section):
    """Huber's M-estimate: a weight for each component, full up to a threshold."""

    threshold: Number = Field(
        default=1.345, description="standard deviations of noise that count in full; 1.345 is 95 % efficient"
    )
    iterations: int = Field(default=10, ge=1, description="steps of the reweighting, for several components")


class Robust(Section):
    """What keeps outliers from leading the filter astray."""

    gate: Gate | None = Field(
        default=None, description="flag rows beyond a limit of their NIS and leave them out"
    )
    student_t: StudentT | None = Field(default=None, description="Student-t noise, {degrees: 4}")
    huber: Huber | None = Field(default=None, description="Huber weights, {threshold: 1.345}")
    fading: Number | None = Field(
        default=None,
        ge=1.0,
        description="alpha of a fading memory: the predicted covariance is alpha^2 F P F' + Q, once a row",
    )


class Adaptive(Section):
    """Noise that follows the innovations, key by key."""

    R: Number | None = Field(
        default=None, gt=0.0, description="part of the way that R moves with a row, such as 0.02; null: fixed"
    )
    Q: Number | None = Field(
        default=None, gt=0.0, description="the same for the process noise: Q, or a structure's variances"
    )


class Mode(Section):
    """One of several models of the system; what it does not say is as in the spec around it."""

    name: str | None = Field(
        default=None, description="letters, digits and _; mode_0, mode_1, ... by default"
    )
    filter: str | None = Field(default=None, description="kind of filter, linear by default")
    process: Process | None = Field(default=None, description="how the state moves in this mode")
    observation: Observation | None = Field(default=None, description="how it is measured in this mode")
    robust: Robust | None = Field(default=None, description="student_t or huber, fading")
    unscented: Unscented | None = Field(default=None, description="the points of filter: unscented")


class Imm(Section):
    """Interacting multiple models."""

    floor: Number = Field(
        default=1e-12, gt=0, description="the probability that no mode falls below, so that it can come back"
    )


class Mmae(Section):
    """Multiple-model adaptive estimation."""

    window: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="measured rows that the modes' probabilities are of, the newest; null: all",
    )
    floor: Number = Field(
        default=1e-12, gt=0, description="the probability that no mode falls below, so that it can come back"
    )


class Rls(Section):
    """Recursive least squares."""

    forgetting: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description="what each row counts less than the next, such as 0.99; 1: nothing is lost",
    )
    delta: Number | None = Field(
        default=None,
        gt=0,
        description="begin with coefficients near zero, as by a ridge penalty; null: exact start",
    )


class Lms(Section):
    """Least mean squares."""

    step: Number = Field(gt=0, description="how far a row's error moves the coefficients, such as 0.01")


class Nlms(Section):
    """Normalised least mean squares."""

    step: Number = Field(
        default=0.5, gt=0, lt=2, description="share of a row's error that is taken out, below 2"
    )
    epsilon: Number = Field(default=1e-6, ge=0, description="added to |h|^2, against division by zero")


NEEDS: dict[str, tuple[str, ...]] = {
    "rls": (),
    "lms": ("lms",),
    "nlms": (),
    "imm": ("modes", "transition", "initial"),
    "mmae": ("modes", "initial"),
}
"""Sections that a kind of filter must have; for the kinds not named here, process, observation and initial."""
OPTIONS = ("unscented", "rls", "lms", "nlms", "imm", "mmae")
"""Sections that hold the options of the filter they are named after."""
