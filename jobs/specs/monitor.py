"""The sections `monitor` and `forecast` of a model spec: windows, rules and forecasts over live estimates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, model_validator

from jobs.core.times import parse_duration_us
from jobs.specs.problems import invalid, suggest_word
from jobs.specs.sections import Duration, Number, OutputsSection, SpecSection
from jobs.specs.source import KafkaSink


class Reading(NamedTuple):
    """A number in an estimate: a column of the estimates, or element `index` of an array column."""

    column: str
    index: int | None = None


class Readings(NamedTuple):
    """The numbers in a model's estimates, by name.

    states, measurement, control: names of the model's states, measured columns and controls. The controls include the
    columns of the table of inputs. outputs: the spec's options for outputs.
    """

    states: Sequence[str]
    measurement: Sequence[str]
    control: Sequence[str]
    outputs: OutputsSection

    @property
    def by_name(self) -> Mapping[str, Reading]:
        """Return every reading by name, including readings that the model's outputs omit."""
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
            ValueError: the reading does not exist, or the outputs omit it (`problems.invalid`, about `field`).
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


class Window(SpecSection):
    """Event-time windows of one length, either fixed or sliding."""

    size: Duration
    """length of a window, such as 10min"""
    slide: Duration | None = None
    """time between the starts of windows, such as 5min; null: where the previous one ended"""
    when: Literal["growing", "final"] = "growing"
    """growing: a window's row is there from its first estimate on, and is updated; final: it is appended once, when the
    watermark has passed its end
    """

    @model_validator(mode="after")
    def _durations(self) -> Self:
        if self.slide is not None and parse_duration_us(self.slide) > parse_duration_us(self.size):
            raise invalid("is longer than the window", "let windows overlap, or leave it out", "slide")
        return self

    @property
    def slide_or_size(self) -> str:
        """Return the duration between the starts of two successive windows."""
        return self.slide or self.size


class Aggregate(SpecSection):
    """An aggregate, over each window, of a number in the estimates."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """name in the windows' aggregates"""
    of: str
    """the number of an estimate, as in rules[].reads, such as measured.COLUMN"""
    kind: Literal["count", "min", "max", "sum", "mean", "variance", "stddev", "quantile", "function"]
    """what is computed of its finite values; variance and stddev are those of a sample; quantile and function keep
    every value of a window
    """
    level: Number | None = Field(default=None, ge=0.0, le=1.0)
    """with kind: quantile, its level, such as 0.9"""
    function: str | None = None
    """with kind: function, module:function, called with the values of many windows in ascending order, and where those
    of each start
    """

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for field, kind in (("level", "quantile"), ("function", "function")):
            given = getattr(self, field) is not None
            if given and self.kind != kind:
                raise invalid(f"is for kind: {kind}", "remove it", field)
            if not given and self.kind == kind:
                raise invalid("is missing", f"give it with kind: {kind}", field)
        if self.function is not None:
            _check_function_name(self.function, "function")
        return self


class Rule(SpecSection):
    """A condition on consecutive readings of a key that raises an alert, and a condition that clears the alert."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """name of the rule in alerts"""
    kind: Literal["level", "nis", "measured", "silence", "function"]
    """reading of each estimate: a state's mean (level), its nis, or the row's measurement (measured); the absence of
    estimates (silence); or what a function of yours decides (function)
    """
    state: str | None = None
    """with kind: level, the state; null: the first"""
    measurement: str | None = None
    """with kind: measured, the measured column; null: the first"""
    at_least: Number | None = None
    """a reading at or above this is out of bounds"""
    at_most: Number | None = None
    """a reading at or below this is out of bounds"""
    rising: bool = False
    """with at_least, each reading must also be above the previous one"""
    readings: int = Field(default=1, ge=1)
    """consecutive readings out of bounds that raise the alert"""
    clear_below: Number | None = None
    """hysteresis: a reading below this is back within bounds; null: at_least"""
    clear_above: Number | None = None
    """hysteresis: a reading above this is back within bounds; null: at_most"""
    clear_readings: int = Field(default=1, ge=1)
    """consecutive readings within bounds that clear it"""
    after: Duration | None = None
    """with kind: silence, how long a key may be silent, such as 1h"""

    function: str | None = None
    """with kind: function, module:function, called with the rows of many keys and their state"""
    reads: list[str] = []
    """with kind: function, the numbers of an estimate that it is given: nis, log_likelihood, mean.STATE,
    variance.STATE, measured.COLUMN, innovation.COLUMN, control.COLUMN
    """
    keeps: dict[str, str] = {}
    """with kind: function, the state that it keeps for each key: each field with its type, float64, int64, bool or
    timestamp, or such as float64[3] for several
    """
    forget: Duration | None = None
    """with kind: function, the silence of a key after which its state begins anew, such as 90d; null: never"""
    parameters: dict[str, Number] = {}
    """with kind: function, numbers that it is given by name, such as {limit: 100.0}"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        silent, own = self.kind == "silence", self.kind == "function"
        if silent and self.after is None:
            raise invalid("is missing", "give the silence that raises the alert, such as 1h", "after")
        if not silent and not own and self.at_least is None and self.at_most is None:
            raise invalid("has no bound", "give at_least, at_most, or both", "")
        bounds = ("at_least", "at_most", "rising", "readings", "clear_below", "clear_above", "clear_readings")
        foreign = [*(bounds if silent or own else ()), *(() if silent else ("after",))]
        foreign += () if own else ("function", "reads", "keeps", "forget", "parameters")
        for field in (one for one in foreign if not self.list_defaults([one])):
            raise invalid(f"is not for kind: {self.kind}", "remove it", field)
        if own:
            self._check_function()
        if self.state is not None and self.kind != "level":
            raise invalid("is for kind: level", "remove it", "state")
        if self.measurement is not None and self.kind != "measured":
            raise invalid("is for kind: measured", "remove it", "measurement")
        if self.rising and self.at_least is None:
            raise invalid("needs at_least", "give it, or remove rising", "rising")
        self._check_hysteresis()
        return self

    def _check_function(self) -> None:
        _check_function_name(self.function or "", "function")
        if not self.reads:
            raise invalid("is empty", "name the numbers of an estimate that it reads, such as nis", "reads")
        for name, kind in self.keeps.items():
            if not name.isidentifier():
                raise invalid(f"'{name}' is not a name", "use letters, digits and _", "keeps")
            if parse_field_type(kind) is None:
                raise invalid(
                    f"'{kind}' is not a type of a field",
                    f"write {', '.join(FIELD_TYPES)}, or such as float64[3]",
                    f"keeps.{name}",
                )
        for name in self.parameters:
            if not name.isidentifier():
                raise invalid(f"'{name}' is not a name", "use letters, digits and _", "parameters")

    def _check_hysteresis(self) -> None:
        for field, bound, value, wider in (
            ("clear_below", "at_least", self.clear_below, 1),
            ("clear_above", "at_most", self.clear_above, -1),
        ):
            limit = getattr(self, bound)
            if value is not None and (limit is None or wider * value > wider * limit):
                raise invalid(f"is not within {bound}", f"give a bound that {bound} lies beyond", field)
        low, high = self.at_most, self.at_least
        if low is not None and high is not None and low >= high:
            raise invalid("is not below at_least", "a reading between the two is within bounds", "at_most")


def _check_function_name(name: str, field: str) -> None:
    module, colon, function = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        raise invalid(f"{name!r} does not name a function", "write module:function", field)


FIELD_TYPES = ("float64", "int64", "bool", "timestamp")


def parse_field_type(text: str) -> tuple[str, int | None] | None:
    """Parse the type of a field that a function keeps (`float64[3]`) into type and length; None if it is not valid."""
    found = re.fullmatch(rf"({'|'.join(FIELD_TYPES)})(?:\[([1-9][0-9]{{0,3}})\])?", text)
    return None if found is None else (found[1], None if found[2] is None else int(found[2]))


class Monitor(SpecSection):
    """The windows and rules of `kalman-pipeline monitor` over a model's live estimates."""

    watermark: Duration = "10min"
    """how far rows may lag the newest event time and still count in their window"""
    by: list[str] = []
    """columns that group windows: key columns; with outputs.control controls and inputs, with outputs.measured
    measurements
    """
    windows: list[Window] = []
    """windows over time, such as {size: 10min, slide: 5min}"""
    aggregates: list[Aggregate] = []
    """more numbers of each window, such as {name: hot, of: measured.volume, kind: quantile, level: 0.9}"""
    windows_kafka: KafkaSink | None = None
    """a topic that also gets each window's row as it changes, {topic: ...}"""
    rules: list[Rule] = []
    """rules over each key's readings, such as {name: hot, kind: level, at_least: 100}"""
    kafka: KafkaSink | None = None
    """a topic that also gets each alert, {topic: ...}"""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not self.windows and not self.rules:
            raise invalid("watches nothing", "give windows, rules, or both", "")
        for field, what, some in (
            ("rules", "rule", self.rules),
            ("aggregates", "aggregate", self.aggregates),
        ):
            names = [one.name for one in some]
            for place, name in enumerate(names):
                if name in names[:place]:
                    raise invalid(
                        f"'{name}' is named twice", f"give each {what} its own name", f"{field}[{place}].name"
                    )
        whens: dict[tuple[str, str], str] = {}
        for place, window in enumerate(self.windows):
            if whens.setdefault((window.size, window.slide_or_size), window.when) != window.when:
                raise invalid(
                    "differs between two windows of one size and slide",
                    "give it once",
                    f"windows[{place}].when",
                )
        for field in ("aggregates", "windows_kafka"):
            if getattr(self, field) and not self.windows:
                raise invalid("needs windows", "give windows, or remove it", field)
        return self

    def check_groups(self, key: Sequence[str], readings: Readings) -> None:
        """Check that the columns by which the estimates are grouped are columns of the model's rows.

        Raises:
            ValueError: the error of `problems.invalid`.
        """
        kinds = {
            **dict.fromkeys(readings.measurement, "measured"),
            **dict.fromkeys(readings.control, "control"),
        }
        for place, name in enumerate(self.by):
            field = f"monitor.by[{place}]"
            if name in key:
                continue
            if name not in kinds:
                known = ", ".join([*key, *kinds])
                raise invalid(f"'{name}' is not a column of a row", f"choose from {known}", field)
            readings.find(f"{kinds[name]}.{name}", field)
            if name.casefold() in WINDOW_COLUMNS:
                raise invalid(f"'{name}' is a column of windows already", "rename it in the data", field)

    def check_readings(self, readings: Readings) -> None:
        """Check that all states and readings that the section names are in the model's estimates.

        Raises:
            ValueError: the error of `problems.invalid`.
        """
        for place, one in enumerate(self.aggregates):
            readings.find(one.of, f"monitor.aggregates[{place}].of")
        for place, rule in enumerate(self.rules):
            if rule.state is not None and rule.state not in readings.states:
                field = f"monitor.rules[{place}].state"
                raise invalid(
                    f"'{rule.state}' is not a state", f"choose from {', '.join(readings.states)}", field
                )
            if rule.kind == "measured":
                name = rule.measurement or readings.measurement[0]
                readings.find(f"measured.{name}", f"monitor.rules[{place}].measurement")
            for i, name in enumerate(rule.reads):
                readings.find(name, f"monitor.rules[{place}].reads[{i}]")

    def definition(self, part: Literal["windows", "rules"]) -> str:
        """Return a short hash of the windows or the rules, which names the checkpoint and is in every output row."""
        if part == "rules":
            rules = [one.model_dump(exclude=one.list_defaults(LATER_IN_RULE)) for one in self.rules]
            content: dict[str, Any] = {"rules": rules}
        else:
            content = self.model_dump(include={"watermark", "by"})
            content["windows"] = [one.model_dump(exclude=one.list_defaults(["when"])) for one in self.windows]
            if self.aggregates:
                content["aggregates"] = [one.model_dump() for one in self.aggregates]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


WINDOW_COLUMNS = frozenset(
    (
        "definition",
        "size",
        "slide",
        "window_start",
        "window_end",
        "rows",
        "late",
        "gated",
        "flagged",
        "nis_rows",
    )
    + ("nis_sum", "mean_sum", "innovation_sum", "mean_nis", "share_gated", "share_flagged", "mean", "bias")
    + ("accumulators", "aggregates", "key", "query", "batch_id", "ordinal", "event_time", "flags", "nis")
    + ("covariance", "innovation", "measured", "control", "log_likelihood", "generation", "model_version")
)
"""Reserved column names: the other columns of windows, and the columns of the estimates that windows read."""
LATER_IN_RULE = ("measurement", "function", "reads", "keeps", "forget", "parameters")
"""Fields of a rule that earlier releases lack. The definition omits such a field if it has its default value."""


class ForecastSkill(SpecSection):
    """The horizons of the forecasts from each estimate, and which later rows are compared with the forecasts."""

    horizons: list[Duration] = Field(min_length=1)
    """how far ahead to forecast, such as [1h, 6h, 1d]"""
    tolerance: Duration | None = None
    """a row up to this long before or after a horizon is compared with it; null: at exactly its time"""
    step: Duration | None = None
    """for a process with one step a row, the duration of a step; horizons are multiples of it"""
    probability: Number = Field(default=0.9, gt=0.0, lt=1.0)
    """with which a measurement lies in the forecast's interval"""
    watermark: Duration = "10min"
    """how far an estimate may lag the newest event time and still be compared"""
    watermark_policy: Literal["min", "max"] = "min"
    """a row may not be older than `watermark` before the newest event time (min), or before the time of the newest
    forecast (max), by which forecasts wait for less long
    """

    _snapshot: str | None = PrivateAttr(None)

    @property
    def snapshot(self) -> str | None:
        """Return the snapshot whose parameters forecasts use; None means the snapshot that began each generation."""
        return self._snapshot

    def with_snapshot(self, snapshot: str | None) -> Self:
        """Return a copy of the section, with another definition, whose forecasts use a snapshot's parameters."""
        copy = self.model_copy()
        copy._snapshot = snapshot
        return copy

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for place, horizon in enumerate(self.horizons):
            if parse_duration_us(horizon) in self.lengths[:place]:
                raise invalid(f"'{horizon}' is given twice", "give each horizon once", f"horizons[{place}]")
        if self.tolerance is not None and self.tolerance_us >= min(self.lengths):
            raise invalid(
                "reaches back to the estimate itself", "give less than the shortest horizon", "tolerance"
            )
        reach = max(self.lengths) + self.tolerance_us
        if self.watermark_policy == "max" and reach > parse_duration_us(self.watermark):
            raise invalid(
                "max leaves every row late, as the newest forecast is further ahead than `watermark`",
                "write min, or a watermark that is at least the longest horizon and the tolerance",
                "watermark_policy",
            )
        if self.step is not None:
            for place, length in enumerate(self.lengths):
                if length % parse_duration_us(self.step):
                    raise invalid(
                        f"is not a multiple of the step {self.step}", "give a multiple", f"horizons[{place}]"
                    )
        return self

    @property
    def lengths(self) -> list[int]:
        """Return the horizons in microseconds."""
        return [parse_duration_us(one) for one in self.horizons]

    @property
    def tolerance_us(self) -> int:
        """Return the tolerance in microseconds."""
        return 0 if self.tolerance is None else parse_duration_us(self.tolerance)

    @property
    def watermark_interval(self) -> str:
        """Return the watermark's delay in Spark's syntax."""
        return f"{parse_duration_us(self.watermark)} microseconds"

    def definition(self) -> str:
        """Return a short hash of the section, which names the checkpoint and is in every output row."""
        with_snapshot = {} if self._snapshot is None else {"snapshot": self._snapshot}
        # Definitions of releases without a watermark policy lack this field, so its default value is left out.
        given = self.model_dump(exclude={"watermark_policy"} if self.watermark_policy == "min" else None)
        text = json.dumps({**given, **with_snapshot}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]
