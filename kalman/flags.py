"""Codes of the reasons why a row was not applied to its key."""

WELL = 0
NON_FINITE = 1
SINGULAR_INNOVATION = 2
NOT_PSD = 3
OVERFLOW = 4
GATED = 5
OUT_OF_SUPPORT = 6

FLAGS: tuple[str | None, ...] = (
    None,
    "non_finite",  # an infinite measurement, or a control input or time step that is NaN
    "singular_innovation",  # the innovation's variance is zero or less: the measurement cannot be weighed
    "not_psd",  # the covariance is not positive semi-definite, by more than rounding explains
    "overflow",  # the state or the likelihood left the range of float64
    "gated",  # the measurement is farther from its prediction than the gate allows
    "out_of_support",  # a measurement that is impossible under the model, such as a count below zero
)
