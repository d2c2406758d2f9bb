"""A filter around another one: what it is of stays the same."""

from dataclasses import dataclass

from kalman.types import Filter


@dataclass(frozen=True)
class Wrapping:
    """The part of a filter that says what its inner filter says."""

    inner: Filter

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return self.inner.states

    @property
    def measurements(self) -> int:
        """Number of measured components."""
        return self.inner.measurements

    @property
    def controls(self) -> int:
        """Number of control inputs."""
        return self.inner.controls
