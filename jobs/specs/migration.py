"""The sections `migrate` and `upgrade` of a model spec: how and when states pass from one version to another.

The answers of a comparison, on which an upgrade decides, are here because Airflow imports them without NumPy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jobs.specs.problems import invalid
from jobs.specs.sections import Number, SpecSection

Share = Annotated[Number, Field(ge=0.0, le=1.0)]


class Origin(SpecSection):
    """The origin of a state: a state of the old version or, for a new state, a distribution."""

    from_: str | None = Field(default=None, alias="from")
    """the old version's state"""
    scale: Number = 1.0
    """new units for one old unit; not 0"""
    offset: Number = 0.0
    """number added after scaling"""
    mean: Number | None = None
    """mean of a new state, at the upgrade, in every key"""
    variance: Number | None = Field(default=None, ge=0.0)
    """variance of a new state, in every key"""
    covariance: dict[str, Number] = {}
    """covariances of a new state with other new ones"""
    initial: bool = False
    """true: a new state, with the distribution in `initial`"""

    @model_validator(mode="after")
    def _one_way(self) -> Origin:
        own = self.mean is not None or self.variance is not None or bool(self.covariance)
        if (self.from_ is not None) + own + self.initial != 1:
            raise invalid(
                "does not give the origin of the state",
                "give one of `from`, `mean` with `variance`, and `initial: true`",
            )
        if own and (self.mean is None or self.variance is None):
            raise invalid("is incomplete for a new state", "give `mean` and `variance`")
        if self.scale == 0.0:
            raise invalid("is 0, which would lose the state", "drop the state and add a new one", "scale")
        if self.from_ is None and (self.scale, self.offset) != (1.0, 0.0):
            raise invalid("scales a state that is new", "remove scale and offset")
        return self


class Transform(SpecSection):
    """A linear map of the whole state: x' = matrix x + offset + noise."""

    matrix: Annotated[list[list[Number]], Field(min_length=1)]
    """a row for each new state, a column for each old one"""
    offset: list[Number] | None = None
    """one number for each new state; null: zeros"""
    noise: list[list[Number]] | None = None
    """covariance that is added, of the new states; null: zeros"""


_FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


class Rekeying(SpecSection):
    """The map from the keys of the previous version to the keys of this version."""

    function: str = Field(pattern=rf"^{_FUNCTION}$")
    """module:function of a pandas table of the old key columns, which returns a table of the new key columns, row by
    row
    """
    merge: str | None = Field(default=None, pattern=rf"^(newest|{_FUNCTION})$")
    """how to merge old keys that get the same new key: null: the migration is refused; newest: the state with the
    newest event time stays; module:function of group (K,), event_time (K,), mean (n, K) and covariance (n*n, K),
    which returns mean (n, G) and covariance (n*n, G)
    """


class StateMapSpec(SpecSection):
    """The map from the states of one version to the states of another version, without keys and parameters."""

    states: dict[str, Origin] = {}
    """states that are not kept under their name: {from, scale, offset}, or for a new one {mean, variance, covariance}
    or {initial: true}
    """
    drop: list[str] = []
    """states of the old version to drop"""
    transform: Transform | None = None
    """instead of states and drop: a linear map"""
    function: str | None = Field(default=None, pattern=rf"^{_FUNCTION}$")
    """instead of these: module:function of mean (n, K), covariance (n*n, K) and a mapping of the other fields, which
    returns the new mean and covariance
    """

    @model_validator(mode="after")
    def _one_way(self) -> StateMapSpec:
        given = {"states": self.states or self.drop, "transform": self.transform, "function": self.function}
        ways = [name for name, way in given.items() if way]
        if len(ways) > 1:
            raise invalid(f"gives several maps: {' and '.join(ways)}", "keep one of them")
        return self


class Migrate(StateMapSpec):
    """The map from the states of an earlier version to the states of this version."""

    from_: int | None = Field(default=None, ge=1, alias="from")
    """the earlier version; null: the previous one"""
    keys: Rekeying | None = None
    """other key columns, or other values in them: {function: module:name}; null: the keys stay"""
    parameters: Literal["keep", "spec"] | None = None
    """learned parameters of the same name and shape are kept, or this spec's are used; null: kept where they mean the
    same, else this spec's
    """
    reverse: StateMapSpec | None = None
    """the map from the states of this version back to those of the earlier one (rollback --last-state): its states,
    drop, transform or function; null: the inverse of this map, where it has one
    """


class Upgrade(SpecSection):
    """The conditions on which a new version of the model may become live."""

    rows: int = Field(default=50, ge=0)
    """least number of rows that both versions have estimated; without any, nothing is promoted"""
    keys: int = Field(default=1, ge=1)
    """least number of keys that these rows have"""
    loss: Number = 0.01
    """log-likelihood per row that the new version may lose against the old one and is still not worse"""
    keys_worse: Share | None = None
    """share of the keys that the new version may predict worse than the old one; null: any"""
    nis_outside: Share | None = None
    """share of the keys whose NIS may be outside its 95 % bounds; 0.05 is expected; null: any"""
    bias_outside: Share | None = None
    """share of the keys whose mean innovation may be outside its 95 % bounds; needs outputs.innovation; null: any"""
    automatic: bool = False
    """true: a scheduled upgrade whose comparison is good needs no approval"""


class Answer(StrEnum):
    """The answer of a comparison."""

    BETTER = "better"
    NOT_WORSE = "not worse"
    WORSE = "worse"
    UNKNOWN = "not enough to tell"


ANSWERS: dict[str, str] = {
    Answer.BETTER: "the new version predicts better",
    Answer.NOT_WORSE: "the new version predicts no worse than is allowed",
    Answer.WORSE: "the new version predicts worse",
    Answer.UNKNOWN: "not enough to tell whether the new version predicts better or worse",
}
