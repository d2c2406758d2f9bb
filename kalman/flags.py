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
    "non_finite",  # an infinite measurement, a control input or a time step that is not a number
    "singular_innovation",  # the innovation's variance is zero or less: the measurement cannot be weighed
    "not_psd",  # the covariance lost its sign beyond what rounding explains
    "overflow",  # the state or the likelihood left the range of float64
    "gated",  # the measurement is farther from its prediction than the gate lets in
    "out_of_support",  # a measurement that the model cannot give, such as a count below zero
)
