"""The numbers of an estimate that rules and windows can read, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jobs.specs.problems import invalid, suggest_word
from jobs.specs.sections import Outputs


class Reading(NamedTuple):
    """A number in an estimate: a column of the estimates, or the element `index` of an array column."""

    column: str
    index: int | None = None


class Readings(NamedTuple):
    """The parts of a model's estimates.

    states, measurement, control: names of the model's states, measured columns and controls (with the inputs of its
    keys); outputs: output options of the model.
    """

    states: Sequence[str]
    measurement: Sequence[str]
    control: Sequence[str]
    outputs: Outputs

    @property
    def by_name(self) -> Mapping[str, Reading]:
        """Return every reading by name, also those that the model's outputs leave out."""
        step = 1 if self.outputs.covariance == "diagonal" else len(self.states) + 1
        found = {"nis": Reading("nis"), "log_likelihood": Reading("log_likelihood")}
        for i, name in enumerate(self.states):
            found[f"mean.{name}"] = Reading("mean", i)
            found[f"variance.{name}"] = Reading("covariance", step * i)
        for kind, names in (
            ("measured", self.measurement),
            ("innovation", self.measurement),
            ("control", self.control),
        ):
            found |= {f"{kind}.{name}": Reading(kind, i) for i, name in enumerate(names)}
        return found

    def find(self, name: str, field: str) -> Reading:
        """Return a reading by name.

        Raises:
            ValueError: the reading does not exist, or the outputs leave it out (`problems.invalid`, about `field`).
        """
        known = self.by_name
        if name not in known:
            choice = f"{suggest_word(name, known)} choose from {', '.join(known)}".strip()
            raise invalid(f"'{name}' is not a number of an estimate", choice, field)
        found = known[name]
        if found.column in ("measured", "innovation", "control") and not getattr(self.outputs, found.column):
            raise invalid(
                f"needs the column {found.column} beside the estimates",
                f"add outputs: {{{found.column}: true}}",
                field,
            )
        return found
