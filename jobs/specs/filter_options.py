"""The sections of a model spec with options of filters: outliers, noise, modes, regressions, mixtures."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jobs.specs.sections import Number, ObservationSection, Process, SpecSection, Unscented


class GateOptions(SpecSection):
    """The gate: rows too far from their prediction are flagged and do not move the state."""

    probability: Number | str | None = None
    """admit rows within this quantile of the NIS of good rows, such as 0.99 (chi-square), or a column"""
    threshold: Number | str | None = None
    """or: the largest NIS that is admitted, such as 9.2, or a column"""
    limit: int | None = Field(default=None, ge=1)
    """after this many consecutive gated rows the next is admitted; null: never"""


class StudentTOptions(SpecSection):
    """Measurement noise with the heavy tails of Student's t, one weight for all components of a row."""

    degrees: Number
    """degrees of freedom, such as 4; fewer mean heavier tails"""
    iterations: int = Field(default=10, ge=1)
    """iterations of the variational update"""


class HuberOptions(SpecSection):
    """Huber's M-estimate: one weight for each component, 1 up to a threshold."""

    threshold: Number = 1.345
    """standard deviations of noise up to which a row has full weight; 1.345 is 95 % efficient"""
    iterations: int = Field(default=10, ge=1)
    """iterations of the reweighting, for several components"""


class RobustOptions(SpecSection):
    """Robustness against outliers."""

    gate: GateOptions | None = None
    """flag rows whose NIS exceeds a limit, and leave the state as it is"""
    student_t: StudentTOptions | None = None
    """Student-t noise, {degrees: 4}"""
    huber: HuberOptions | None = None
    """Huber weights, {threshold: 1.345}"""
    fading: Annotated[Number, Field(ge=1.0)] | str | None = None
    """alpha of a fading memory, a number or a column: the predicted covariance is alpha^2 F P F' + Q, once a row"""


class AdaptiveOptions(SpecSection):
    """Noise covariances that adapt to the innovations, key by key."""

    R: Number | None = Field(default=None, gt=0.0)
    """step size with which R adapts at each row, such as 0.02; null: fixed"""
    Q: Number | None = Field(default=None, gt=0.0)
    """step size for the process noise: Q, or a structure's variances"""


class Mode(SpecSection):
    """One of several models of the system. A field that the mode omits has the value in the spec."""

    name: str | None = None
    """letters, digits and _; mode_0, mode_1, ... by default"""
    filter: str | None = None
    """kind of filter, linear by default"""
    process: Process | None = None
    """the process model in this mode"""
    observation: ObservationSection | None = None
    """the observation model in this mode"""
    robust: RobustOptions | None = None
    """student_t or huber, fading"""
    unscented: Unscented | None = None
    """the sigma points of filter: unscented"""


class Imm(SpecSection):
    """Interacting multiple models."""

    floor: Number = Field(default=1e-12, gt=0)
    """least probability of a mode, so that it can recover"""


class Mmae(SpecSection):
    """Multiple-model adaptive estimation."""

    window: int | None = Field(default=None, ge=1, le=1000)
    """newest measured rows from which the modes' probabilities are computed; null: all"""
    floor: Number = Field(default=1e-12, gt=0)
    """least probability of a mode, so that it can recover"""


class Rls(SpecSection):
    """Recursive least squares."""

    forgetting: Number = Field(default=1.0, gt=0, le=1)
    """weight of a row relative to the next one, such as 0.99; 1: nothing is forgotten"""
    delta: Number | None = Field(default=None, gt=0)
    """start with coefficients near zero, as by a ridge penalty; null: exact start"""


class Lms(SpecSection):
    """Least mean squares."""

    step: Number = Field(gt=0)
    """step size: how far a row's error moves the coefficients, such as 0.01"""


class Nlms(SpecSection):
    """Normalised least mean squares."""

    step: Number = Field(default=0.5, gt=0, lt=2)
    """share of a row's error that is corrected, below 2"""
    epsilon: Number = Field(default=1e-6, ge=0)
    """added to |h|^2, against division by zero"""


class MixtureStep(SpecSection):
    """The step size of a mixture, which is max((t + offset)^-decay, minimum) at step t."""

    decay: Annotated[Number, Field(gt=0, le=1)] | str = 0.6
    """how fast the step size falls, a number or a column; above 0.5 the mixture converges"""
    offset: Annotated[Number, Field(gt=0)] | str = 20.0
    """steps that the start counts as, a number or a column; more give the start more weight"""
    minimum: Annotated[Number, Field(ge=0, le=1)] | str = 0.0
    """least step size, a number or a column, so that the mixture keeps following changes, such as 0.01"""


class Mixture(SpecSection):
    """A mixture: its components, and how they are learned by the filter and by `pretrain`."""

    components: int | None = Field(default=None, ge=1, le=50)
    """number of components; null: as many as are given"""
    categories: int | list[int] | None = None
    """categorical_mixture: how many categories each measurement has, whose codes are 0, 1, ...; one number for all
    measurements, or a list
    """
    weights: list[Number | str] | None = None
    """weights of the start; null: equal. Numbers, or columns of the key's first row, as all components"""
    means: list[Any] | None = None
    """gaussian_mixture: a list of means, one for each component"""
    covariances: list[Any] | None = None
    """gaussian_mixture: a list of covariance matrices, one for each component"""
    rates: list[Any] | None = None
    """poisson_mixture: a list of rates, one for each component"""
    probabilities: list[Any] | None = None
    """bernoulli_mixture: a list of probabilities of 1, one for each component; categorical_mixture: for each component
    the probabilities of the categories, those of one measurement after the other
    """
    step: MixtureStep = Field(default_factory=MixtureStep)
    """the step size of each row"""
    batch: Annotated[int, Field(ge=1, le=1_000_000)] | str = 1
    """rows of a key in one step, a number or a column"""
    warm_up: int | None = Field(default=None, ge=1, le=1_000_000)
    """a key's first rows, such as 20, during which its components stay as they began; null: none"""
    floor: Number | None = Field(default=None, gt=0)
    """least variance of a component, as a share of the whole mixture's (null: 1e-6); least rate, or distance of a
    probability from 0 and 1 (null: 1e-9)
    """
    starts: int = Field(default=5, ge=1, le=100)
    """random starts from which pretrain chooses, where no components are given"""
    holdout: Number = Field(default=0.1, ge=0, le=0.5)
    """share of the rows that pretrain holds out to choose the start"""


MIXTURES = ("gaussian_mixture", "poisson_mixture", "bernoulli_mixture", "categorical_mixture")

NEEDS: dict[str, tuple[str, ...]] = {
    "rls": (),
    "lms": ("lms",),
    "nlms": (),
    "imm": ("modes", "transition", "initial"),
    "mmae": ("modes", "initial"),
    **dict.fromkeys(MIXTURES, ("mixture",)),
}
"""Required sections for each kind of filter; kinds that are not listed require process, observation and initial."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "unscented": ("unscented",),
    "rls": ("rls",),
    "lms": ("lms",),
    "nlms": ("nlms",),
    "imm": ("imm",),
    "mmae": ("mmae",),
    "mixture": MIXTURES,
}
"""Optional sections, each with the kinds of filters that allow the section."""
