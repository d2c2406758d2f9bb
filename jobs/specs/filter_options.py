"""The sections of a model spec that change how a filter takes a row."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jobs.specs.sections import Number, Observation, Process, Section, Unscented


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


class MixtureStep(Section):
    """How far a row moves a mixture: max((t + offset)^-decay, minimum) at the t-th step."""

    decay: Number = Field(
        default=0.6, gt=0, le=1, description="how fast steps get shorter; above 0.5 the mixture settles"
    )
    offset: Number = Field(
        default=20.0, gt=0, description="steps that the start counts for, the more, the longer it lasts"
    )
    minimum: Number = Field(
        default=0.0, ge=0, le=1, description="shortest step, to go on following changes, such as 0.01"
    )


class Mixture(Section):
    """A mixture: its components, and how they are learned, online and by pretrain."""

    components: int | None = Field(
        default=None, ge=1, le=50, description="how many there are; null: as many as are written"
    )
    weights: list[Number] | None = Field(default=None, description="of the start; null: all the same")
    means: list[Any] | None = Field(
        default=None, description="gaussian_mixture: a list of means, one for each component"
    )
    covariances: list[Any] | None = Field(
        default=None, description="gaussian_mixture: a list of covariance matrices, one for each component"
    )
    rates: list[Any] | None = Field(
        default=None, description="poisson_mixture: a list of rates, one for each component"
    )
    probabilities: list[Any] | None = Field(
        default=None, description="bernoulli_mixture: a list of probabilities of 1, one for each component"
    )
    step: MixtureStep = Field(default_factory=MixtureStep, description="how far each row moves the mixture")
    batch: int = Field(default=1, ge=1, le=1_000_000, description="rows of a key that are taken together")
    floor: Number | None = Field(
        default=None,
        gt=0,
        description="least variance of a component as part of the whole mixture's (null: 1e-6), least rate, or "
        "distance of a probability from 0 and 1 (null: 1e-9)",
    )
    starts: int = Field(
        default=5,
        ge=1,
        le=100,
        description="starts that pretrain chooses from where no components are written",
    )
    holdout: Number = Field(
        default=0.1,
        ge=0,
        le=0.5,
        description="part of the rows that pretrain keeps aside to choose the start by",
    )


MIXTURES = ("gaussian_mixture", "poisson_mixture", "bernoulli_mixture")

NEEDS: dict[str, tuple[str, ...]] = {
    "rls": (),
    "lms": ("lms",),
    "nlms": (),
    "imm": ("modes", "transition", "initial"),
    "mmae": ("modes", "initial"),
    **dict.fromkeys(MIXTURES, ("mixture",)),
}
"""Sections that a kind of filter must have; for the kinds not named here, process, observation and initial."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "unscented": ("unscented",),
    "rls": ("rls",),
    "lms": ("lms",),
    "nlms": ("nlms",),
    "imm": ("imm",),
    "mmae": ("mmae",),
    "mixture": MIXTURES,
}
"""Sections that hold the options of the kinds of filters that they are for."""
