"""Model specs: the YAML files that define a filter, checked field by field.

Importing this module loads neither NumPy, pandas nor Spark, so that Airflow can read specs while it parses DAGs.
`jobs.state.kernel` checks the parts that need numerical libraries: dimensions, and whether covariances are positive.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, Literal, Self, cast
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, PrivateAttr, model_validator

from jobs.core.time_counts import COUNTS
from jobs.core.times import DIRECTIVES, UNIT_US, TimeParser
from jobs.specs import yaml_text
from jobs.specs.airflow import Airflow
from jobs.specs.column_names import (
    ESTIMATE_COLUMNS,
    LONGEST,
    OUTPUT_COLUMNS,
    find_time_parts,
    is_plain,
    with_plain_names,
)
from jobs.specs.files import Files
from jobs.specs.filter_options import (
    MIXTURES,
    NEEDS,
    OPTIONS,
    AdaptiveOptions,
    Imm,
    Lms,
    Mixture,
    Mmae,
    Mode,
    Nlms,
    Rls,
    RobustOptions,
)
from jobs.specs.functions import (
    choose_search_folder,
    find_refusal,
    list_function_fields,
    list_functions,
)
from jobs.specs.migration import Migrate, Upgrade
from jobs.specs.monitor import ForecastSkill, Monitor, Readings
from jobs.specs.problems import Problem, SpecError, find_line, invalid, suggest_key, suggest_word
from jobs.specs.retention import Retention
from jobs.specs.row_order import Duplicates, Expiry, Order, QuarantineLimit, TimeRange
from jobs.specs.sections import (
    Initial,
    Inputs,
    Learn,
    Names,
    Number,
    ObservationSection,
    OutputsSection,
    Process,
    Smoothing,
    SpecSection,
    Storage,
    Stream,
    Unscented,
    describe_fields,
)
from jobs.specs.source import Sinks, Source

__all__ = ["ModelSpec", "SpecError"]

TimeUnit = Literal["microsecond", "millisecond", "second", "minute", "hour", "day", "week"]
DEFAULT_MISSING = ("", "NA", "NaN", "null")
EARLIER = "versions"
"""The subfolder for the specs of earlier versions, in the folder of models."""
# The fields that `kalman.build` reads, besides `learn`. In the fields in NUMERIC, 1 and 1.0 count as equal.
DEFINITION = (
    "filter",
    "states",
    "measurement",
    "control",
    "process",
    "observation",
    "initial",
    "robust",
    "adaptive",
    "smoothing",
    "storage",
    "modes",
    "transition",
    *OPTIONS,
)
NUMERIC = {"process", "observation", "initial", "robust", "adaptive", "modes", "transition", *OPTIONS}


_OF_READERS = ("_line", "_bytes", "_corrupt")
"""Columns that the file readers add to the columns of a file."""
_NAME, LONGEST_NAME = r"^[a-z][a-z0-9_]*$", 64


def is_model_name(text: str) -> bool:
    """Return whether a text is a valid model name. Folders of the model's tables have the same name."""
    return len(text) <= LONGEST_NAME and re.fullmatch(_NAME, text) is not None


def _allow_several(schema: dict[str, Any]) -> None:
    """Change a JSON schema so that the time may have several columns: a list, or a mapping of parts to columns."""
    texts = {"type": "string"}
    schema["anyOf"] = [
        {"type": schema.pop("type")},
        {"type": "array", "items": texts},
        {"type": "object", "additionalProperties": texts},
    ]


class ModelSpec(SpecSection):
    """The spec of one model: its data, its filter, and how the model is run."""

    name: str = Field(pattern=_NAME, max_length=LONGEST_NAME)
    """lower-case letters, digits and _"""
    version: int = Field(ge=1, le=2**31 - 1)
    """a whole number from 1; raise it whenever the meaning of the state changes"""
    description: str = ""
    """what the model is for"""
    key: list[str] = []
    """the columns whose values identify one system, such as [river]; none: all rows are of one system"""
    key_from_name: str | None = None
    """the key column whose value is the name of the file, without folder and ending, such as sensor; null: every key
    column is in the files
    """
    line_pattern: str | None = None
    """how to read lines of text (.txt, .log): a regular expression of Python that a whole line matches, with a named
    group for each column, (?P<level>...); null: there are none
    """
    files: Files = Field(default_factory=Files)
    """how CSV files and lines of text are written: separator, decimal, columns where there is no header"""
    time: str = Field(json_schema_extra=_allow_several)
    """the column of the event time; or the columns that make it together, such as [date, hour] or {date: DATE, hour:
    HE}
    """
    time_unit: TimeUnit = "second"
    """the unit of dt in F(dt) and Q(dt)"""
    time_zone: str = "UTC"
    """time zone of times without an offset, such as America/New_York"""
    time_format: str | None = None
    """null: ISO 8601; or directives such as %d.%m.%Y %H:%M or %Y%m%d; or the name of a count, such as epoch_seconds,
    epoch_milliseconds, spreadsheet_days, julian_days, matlab_days; or a unit and a beginning, such as hours since
    1900-01-01
    """
    time_range: TimeRange = Field(default_factory=TimeRange)
    """the times that rows may have; others are rejected, so that one row of a wrong clock does not make all later ones
    late
    """
    missing_values: list[str] = list(DEFAULT_MISSING)
    """texts that mean a missing measurement, besides null; in any case"""
    measurement: Names
    """the measured columns, in the order of the rows of H"""
    control: list[str] = []
    """columns of known inputs: the columns of B, or entries of matrices by name"""
    inputs: Inputs | None = None
    """numbers that belong to a key, from a table, such as {columns: {noise: noise_db}}; null: none"""
    filter: str = Field(
        default="linear",
        pattern=r"^[a-z][a-z0-9_]*$",
        examples=["linear", "extended", "unscented", "cubature"],
    )
    """the kind of filter"""
    form: Literal["covariance", "square_root", "information"] | None = None
    """numerical form: covariance (null), square_root (factors and rotations, for badly scaled models), information
    (linear and extended, for many more measurements than states)
    """
    unscented: Unscented | None = None
    """the sigma points of filter: unscented"""
    states: Names
    """the states' names, in the order of the mean; for a mixture those of the measurements, of a categorical one those
    of the categories, as in color_0
    """
    process: Process | None = None
    """the process model, such as {kind: random_walk, variance: 1.0}"""
    observation: ObservationSection | None = None
    """the observation model, such as {H: [[1.0]], R: [[1.0]]}"""
    initial: Initial | None = None
    """the initial distribution: {mean: [...], covariance: [[...]]} or {diffuse: true}"""
    modes: list[Mode] | None = None
    """with filter: imm or mmae, a list of modes, each {process: ..., observation: ...}"""
    transition: list[list[Number]] | None = None
    """with filter: imm, the probability of each mode at the next row, one row for each current mode"""
    imm: Imm | None = None
    """options of filter: imm"""
    mmae: Mmae | None = None
    """options of filter: mmae"""
    rls: Rls | None = None
    """options of filter: rls"""
    lms: Lms | None = None
    """options of filter: lms"""
    nlms: Nlms | None = None
    """options of filter: nlms"""
    mixture: Mixture | None = None
    """components of a mixture, such as {components: 2, rates: [15.0, 25.0]}"""
    robust: RobustOptions | None = None
    """robustness against outliers: gate, student_t or huber, fading"""
    adaptive: AdaptiveOptions | None = None
    """noise covariances that adapt to the innovations: R, Q"""
    learn: Learn | None = None
    """the parameters that `pretrain` learns; null: none"""
    smoothing: Smoothing | None = None
    """fixed-lag smoothing; null: none"""
    storage: Storage | None = None
    """storage of a key's state; null: in 64 bits"""
    migrate: Migrate | None = None
    """the map from the states of the previous version to those of this one"""
    upgrade: Upgrade = Field(default_factory=Upgrade)
    """conditions on which this version may become live"""
    outputs: OutputsSection = Field(default_factory=OutputsSection)
    """the contents of each estimate"""
    order: Order = Field(default_factory=Order)
    """the order in which the stream applies a key's rows, such as {kind: strict, delay: 15min}"""
    late: Literal["quarantine", "apply"] = "quarantine"
    """quarantine or apply a row that is older than its key's state in the stream"""
    duplicates: Duplicates | None = None
    """of the rows of one key and time, or of one key and id, only the first counts; what to do with the others, such as
    {action: drop}; null: each row counts
    """
    expiry: Expiry | None = None
    """when a silent key expires, such as {after: 30d}; null: never"""
    quarantine: QuarantineLimit | None = None
    """share of rejected rows that fails a micro-batch or a file, such as {fail_above: 0.1}; null: none"""
    source: Source | None = None
    """the topic of the measurements, such as {kind: kafka, topic: readings}; null: the landed files"""
    sinks: Sinks = Field(default_factory=Sinks)
    """where estimates go besides their table, such as {latest: true}"""
    monitor: Monitor | None = None
    """windows and rules of `monitor` over the estimates; null: none"""
    forecast: ForecastSkill | None = None
    """forecasts that `skill` compares with later rows, such as {horizons: [1h, 1d]}; null: none"""
    stream: Stream = Field(default_factory=Stream)
    """micro-batches and layout of the stream"""
    retention: Retention = Field(default_factory=Retention)
    """what `maintain` keeps"""
    airflow: Airflow = Field(default_factory=Airflow)
    """schedules of the model's DAGs"""

    _source: Path | None = PrivateAttr(None)
    _folder: str | None = PrivateAttr(None)
    _lines: dict[yaml_text.Path, int] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _names_and_states(cls, data: Any) -> Any:
        given = with_plain_names(cast(dict[str, Any], data)) if isinstance(data, dict) else {}
        if given.get("filter") in MIXTURES and "states" not in given and "measurement" in given:
            return {**given, "states": name_mixture_states(given["measurement"], given.get("mixture"))}
        return given or data

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for field, names in self._names_by_field:
            _check_columns(names, field)
        _check_columns(self.states, "states", what="state")
        if self.key_from_name is not None and self.key_from_name not in self.key:
            raise invalid(
                f"'{self.key_from_name}' is not a key column", suggest_key(self.key), "key_from_name"
            )
        self._check_names()
        self._check_lines()
        self._check_sections()
        self._check_named_columns()
        self._check_disjoint()
        self._check_groups()
        self._check_outputs()
        self._check_times()
        self._check_order()
        if self.source is not None:
            self.source.check_keys(self.key, self.id_columns)
        if self.monitor is not None:
            self.monitor.check_groups(self.key, self.readings)
            self.monitor.check_readings(self.readings)
        elif self.airflow.monitor.schedule is not None:
            raise invalid(
                "there is nothing to monitor",
                "add `monitor` with windows or rules",
                "airflow.monitor.schedule",
            )
        for dag in ("skill", "forecast"):
            if self.forecast is None and getattr(self.airflow, dag).schedule is not None:
                raise invalid(
                    "there is nothing to forecast", "add `forecast` with horizons", f"airflow.{dag}.schedule"
                )
        if self.inputs is not None:
            self.inputs.check_names(self.key)
        if self.outputs.control and not (self.control or self.input_names):
            raise invalid("the model has no controls and no inputs", "remove it", "outputs.control")
        if self.forecast is not None and not self.outputs.measured:
            raise invalid(
                "needs the measurements beside the estimates", "add outputs: {measured: true}", "forecast"
            )
        return self

    @property
    def _names_by_field(self) -> list[tuple[str, list[str]]]:
        """Return the names of the columns of a row, by the field that gives them."""
        return [
            ("key", self.key),
            ("time", [self.time]),
            ("measurement", self.measurement),
            ("control", self.control),
            ("inputs.columns", self.input_names),
            ("duplicates.id", self.id_columns),
        ]

    def _check_names(self) -> None:
        """Check that the entries of `files.names` name columns, and that only the time is read from several columns."""
        known = [*self.columns, *([] if self.inputs is None else self.inputs.columns.values())]
        for name, columns in self.files.names.items():
            field = f"files.names.{name}"
            if name not in known:
                hint = suggest_word(name, known) or f"columns of the spec are {', '.join(known)}"
                raise invalid(f"'{name}' is not a column of the spec", hint, field)
            if isinstance(columns, str):
                continue
            if name != self.time:
                raise invalid("has several columns, which only the time can have", "name one column", field)
            try:
                find_time_parts(columns)
            except ValueError as error:
                problem, _, remedy = str(error).partition("; ")
                raise invalid(problem, remedy, "time") from error

    def _check_lines(self) -> None:
        if self.files.wide is not None:
            self.files.wide.check_names(self.key, self.list_file_columns([self.time]), self.measurement)
        if self.files.columns:
            for name in self.file_columns:
                if name not in self.files.columns:
                    hint = suggest_word(name, self.files.columns) or "name every column of the file, in order"
                    raise invalid(f"has no column '{name}', which the spec names", hint, "files.columns")
        if self.line_pattern is None:
            return
        try:
            groups = re.compile(self.line_pattern).groupindex
        except re.error as error:
            raise invalid(
                f"is no regular expression: {error}", "see Python's re; test it there", "line_pattern"
            ) from error
        for name in groups:
            if name in _OF_READERS:
                raise invalid(f"'{name}' cannot be the name of a group", "take another name", "line_pattern")
        for name in self.file_columns:
            if name not in groups:
                remedy = f"write (?P<{name}>...) around the part of the line that has it"
                raise invalid(f"has no group for column '{name}'", remedy, "line_pattern")
        if self.key_from_name in groups:
            remedy = "remove the group, or the field key_from_name"
            raise invalid(
                f"has a group '{self.key_from_name}', whose value is the file's name", remedy, "line_pattern"
            )

    def _check_sections(self) -> None:
        for field in NEEDS.get(self.filter, ("process", "observation", "initial")):
            if getattr(self, field) is None:
                raise invalid("is missing", f"add it: {describe_fields(type(self))[field]}", field)
        if self.filter not in ("imm", "mmae"):
            several = {"modes": self.modes, "transition": self.transition}
            if self.initial is not None:
                several["initial.mode_probabilities"] = self.initial.mode_probabilities
            for field, value in several.items():
                if value is not None:
                    raise invalid("is for filter: imm or mmae", "remove it, or write filter: imm", field)
        for field, kinds in OPTIONS.items():
            if getattr(self, field) is not None and self.filter not in kinds:
                known = " or ".join(kinds)
                raise invalid(f"is for filter: {known}", f"remove it, or write filter: {known}", field)
        if self.initial is not None and self.filter not in ("lms", "nlms"):
            if self.initial.covariance is None and self.initial.diffuse is not True:
                raise invalid("is incomplete", "give `mean` and `covariance`, or `diffuse: true`", "initial")

    def _check_named_columns(self) -> None:
        """Check that each text in place of a number names a column of `control` or `inputs`."""
        known = {*self.control, *self.input_names}
        sections = {"initial": self.initial, "robust": self.robust, "mixture": self.mixture}
        fields = {
            "initial": ("mean", "covariance"),
            "robust": ("fading", "gate"),
            "mixture": ("weights", "means", "covariances", "rates", "probabilities", "step", "batch"),
        }
        for name, section in sections.items():
            for field in fields[name] if section is not None else ():
                value = getattr(section, field)
                value = value.model_dump() if isinstance(value, SpecSection) else value
                for place, text in _list_texts(f"{name}.{field}", value):
                    if text not in known:
                        raise invalid(
                            "must be a number, not text", "or name a column of control or inputs", place
                        )

    def _check_disjoint(self) -> None:
        taken: dict[str, str] = {}
        for field, names in self._names_by_field:
            for name in names:
                other = taken.setdefault(name.casefold(), field)  # Spark ignores case
                if other != field:
                    raise invalid(
                        f"column '{name}' is already used in {other}", "a column has one role", field
                    )

    def _check_groups(self) -> None:
        for i, name in enumerate(() if self.learn is None else self.learn.by):
            if name not in self.key:
                raise invalid(f"'{name}' is not a key column", suggest_key(self.key), f"learn.by[{i}]")

    def _check_outputs(self) -> None:
        pairs = [f"covariance_{a}_{b}" for a in self.states for b in self.states]
        if len(set(pairs)) != len(pairs):
            raise invalid(
                "two pairs of states share an output column covariance_<state>_<state>",
                "rename one",
                "states",
            )
        flat = [*pairs, *(f"mean_{state}" for state in self.states)]
        reserved = {
            *OUTPUT_COLUMNS,
            *flat,
            *(f"{when}_{name}" for when in ("smoothed", "lagged") for name in flat),
        }
        for name in self.outputs.columns:
            inside = self.measurement if name != "control" else [*self.control, *self.input_names]
            reserved |= {name, *(f"{name}_{column}" for column in inside)}
        if self.outputs.sliding_log_likelihood is not None:
            reserved.add("sliding_log_likelihood")
        of_keys = {*reserved, *ESTIMATE_COLUMNS, *(["key"] if len(self.key) > 1 else [])}
        for field, names, taken in (("key", self.key, of_keys), ("time", [self.time], reserved)):
            for name in names:
                if name.casefold() in {word.casefold() for word in taken}:
                    raise invalid(
                        f"'{name}' is the name of an output column",
                        f"give the column another name in the spec: files: {{names: {{{field}_{name}: {name}}}}}",
                        field,
                    )

    def _check_order(self) -> None:
        if self.id_columns and self.stream.new_keys == "pretrained":
            raise invalid(
                "does not go with stream.new_keys: pretrained, as pretrained states come without ids",
                "remove one of them",
                "duplicates.id",
            )
        if self.late == "apply" and self.order.kind != "as-arrived":
            raise invalid(
                f"is for order.kind: as-arrived, and it is {self.order.kind}",
                "remove it: rows that are too late for the order go to quarantine",
                "late",
            )
        if self.order.kind == "replay" and self.expiry is not None:
            raise invalid("does not go with order.kind: replay", "remove one of them", "expiry")
        uses = self.order.waits or (self.expiry is not None and self.expiry.clock == "event")
        if self.order.delay is not None and not uses:
            raise invalid(
                "is for a watermark, and nothing here waits for one",
                "remove it, or write kind: strict",
                "order.delay",
            )

    def _check_times(self) -> None:
        try:
            ZoneInfo(self.time_zone)
        except (OSError, ValueError, KeyError) as error:
            hint = suggest_word(self.time_zone, available_timezones())
            remedy = f"{hint} names are those of the IANA list, such as America/New_York".strip()
            raise invalid(f"'{self.time_zone}' is not a time zone", remedy, "time_zone") from error
        try:
            TimeParser(self.time_format, UTC)
        except ValueError as error:
            remedy = f"use {DIRECTIVES}, or one of {', '.join(COUNTS)}, or such as hours since 1900-01-01"
            raise invalid(
                f"'{self.time_format}' is not a time format: {error}", remedy, "time_format"
            ) from error

    @property
    def source_path(self) -> Path | None:
        """Return the file that the spec was loaded from."""
        return self._source

    @property
    def folder(self) -> str | None:
        """Return the folder of models that contains the spec's file and its functions; None if unknown."""
        return self._folder

    @property
    def functions_folder(self) -> str | None:
        """Return the folder in which the spec's functions are searched; None if only the Python path is searched."""
        return choose_search_folder(self._folder)

    def with_folder(self, folder: str | None) -> Self:
        """Return a copy of a spec from a manifest; `folder` is the folder of the spec's functions."""
        spec = self.model_copy()
        spec._folder = folder
        return spec

    @property
    def unit_us(self) -> float:
        """Return the number of microseconds in one time unit."""
        return float(UNIT_US[self.time_unit])

    @property
    def timed(self) -> bool:
        """Return whether the stream needs the event-time operator (`jobs.streaming.processors`)."""
        return self.order.kind != "as-arrived" or self.duplicates is not None or self.expiry is not None

    @property
    def idle_us(self) -> int | None:
        """Return the microseconds of silence after which a key restarts from the prior; None means never."""
        by_rows = self.expiry is not None and self.expiry.returns == "prior" and self.expiry.clock == "event"
        return self.expiry.after_us if self.expiry is not None and by_rows else None

    @property
    def source_kind(self) -> str:
        """Return the kind of the stream's source: kafka, or delta for the measurements table."""
        return "delta" if self.streamed_source is None else "kafka"

    @property
    def streamed_source(self) -> Source | None:
        """Return the topic that the stream reads, or None if the stream reads the measurements table."""
        return self.source if self.source is not None and self.source.streamed else None

    @property
    def readings(self) -> Readings:
        """Return the numbers of an estimate that rules and windows can read."""
        return Readings(self.states, self.measurement, [*self.control, *self.input_names], self.outputs)

    @property
    def speaks_to_kafka(self) -> bool:
        """Return whether commands of this model need Spark's connector for Kafka."""
        monitor = self.monitor
        watched = monitor is not None and (monitor.kafka is not None or monitor.windows_kafka is not None)
        topics = self.source is not None and self.source.kind == "kafka"
        return topics or self.sinks.kafka is not None or watched

    @property
    def columns(self) -> list[str]:
        """Return the columns that rows must have: key, time, measurement, control, and the id of `duplicates`."""
        return [*self.key, self.time, *self.measurement, *self.control, *self.id_columns]

    @property
    def file_columns(self) -> list[str]:
        """Return the columns that files must have, under their names in the files, without `key_from_name`."""
        return self.list_file_columns(name for name in self.columns if name != self.key_from_name)

    def list_file_columns(self, names: Iterable[str]) -> list[str]:
        """Return the columns of a file from which the given columns of the spec are read, without repetitions."""
        found: list[str] = []
        for name in names:
            columns = self.files.names.get(name, name)
            found += [columns] if isinstance(columns, str) else find_time_parts(columns).values()
        return list(dict.fromkeys(found))

    @property
    def time_parts(self) -> dict[str, str]:
        """Return the column of each part of the time, by part; empty if one column contains the whole time."""
        columns = self.files.names.get(self.time, self.time)
        return {} if isinstance(columns, str) else find_time_parts(columns)

    @property
    def id_columns(self) -> list[str]:
        """Return a list with the column of the id that identifies repeated rows; empty without such a column."""
        return [] if self.duplicates is None or self.duplicates.id is None else [self.duplicates.id]

    @property
    def naming_columns(self) -> list[str]:
        """Return the columns whose values are names, not quantities: the key columns and the id."""
        return [*self.key, *self.id_columns]

    @property
    def input_names(self) -> list[str]:
        """Return the names of the numbers from the table of inputs. In each row they follow the control columns."""
        return [] if self.inputs is None else list(self.inputs.columns)

    @property
    def inputs_table(self) -> str:
        """Return the path of the table of inputs."""
        given = None if self.inputs is None else self.inputs.table
        return given or f"inputs/{self.name}"

    def definition(self) -> dict[str, Any]:
        """Return the argument of `kalman.build`, as plain Python.

        Raises:
            SpecError: the definition names a function of a module that is not listed (`jobs.specs.functions`). The spec
                may come from a manifest, and write access to tables must not be enough to run code.
        """
        result = self._build_definition()
        for name in list_functions(result):
            refused = find_refusal(name, self.folder)
            if refused is not None:
                raise SpecError(self.problem(name, *refused))
        return result

    def find_refused_functions(self) -> list[Problem]:
        """Return a problem for each function, in any section, whose module is not listed."""
        sections = {"process", "observation", "modes", "monitor", "sinks", "migrate"}
        found = list_function_fields(self.model_dump(include=sections, exclude_none=True))
        refused = ((field, find_refusal(name, self.folder)) for field, name in found)
        return [self.problem(field, *why) for field, why in refused if why is not None]

    def _build_definition(self) -> dict[str, Any]:
        result = self.model_dump(include=set(DEFINITION), exclude_none=True)
        if self.inputs is not None:
            result["control"] = [*self.control, *self.input_names]
        if self.form not in (None, "covariance"):
            result["form"] = self.form
        if self.outputs.sliding_log_likelihood is not None:
            result["sliding_log_likelihood"] = self.outputs.sliding_log_likelihood
        folder = self.functions_folder if any(list_functions(result)) else None
        if folder is not None:
            result["folder"] = folder
        result["learn"] = self.learn and self.learn.definition()
        return result

    def format_stored_text(self) -> str:
        """Return the spec as JSON for a manifest, without the settings of landing that have default values.

        Stored states do not depend on how files are read. A driver of an earlier release refuses a manifest with
        unknown settings.
        """
        said = self.model_dump(include={"files", "time_range"}, exclude_defaults=True)
        landing = {"files": type(self.files), "time_range": type(self.time_range)}
        unsaid = {
            name: (section.model_fields.keys() - said[name].keys() if name in said else True)
            for name, section in landing.items()
        }
        tables = {
            name: {"clones"}
            for name in ("source", "inputs")
            if not getattr(getattr(self, name), "clones", False)
        }
        return self.model_dump_json(by_alias=True, exclude={**unsaid, **tables})

    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of all fields on which the meaning of the stored state depends.

        The hash includes name, version, columns, time unit, filter, states, process, observation, initial distribution
        and learned parameters. It excludes the description, the parsing of text, and how the model is run. Of a
        function the hash includes only the name.
        """
        meaning = {
            **{field: value for field, value in self._build_definition().items() if field != "folder"},
            **self.model_dump(include={"name", "version", "key", "time", "time_unit"}),
            **self._select_timing(),
        }
        for field in NUMERIC & meaning.keys():
            meaning[field] = as_floats(meaning[field])
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def _select_timing(self) -> dict[str, Any]:
        """Return the options on time that determine the meaning of the state, except options with default values."""
        parts: dict[str, Any] = {"order": self.order.meaning(), "distinct": False}
        if self.duplicates is not None:
            parts["distinct"] = self.duplicates.meaning()
        if self.expiry is not None:
            parts["expiry"] = {"after": self.expiry.after_us, **self.expiry.model_dump(exclude={"after"})}
        return {name: meaning for name, meaning in parts.items() if meaning}

    def problem(self, field: str, problem: str, remedy: str) -> Problem:
        """Return a problem of a field, with the file and line of the field."""
        path = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", field)]
        file = str(self._source) if self._source else f"model {self.name}"
        return Problem(file, field, problem, remedy, find_line(path, self._lines))


def _list_texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text in a nested value, each with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in cast(dict[str, Any], value).items():
            yield from _list_texts(f"{place}.{name}", item)
    elif isinstance(value, list):
        for i, item in enumerate(cast(list[Any], value)):
            yield from _list_texts(f"{place}[{i}]", item)


def _check_columns(names: Sequence[str], field: str, what: str = "column") -> None:
    for name in names:
        if not is_plain(name):
            remedy = f"use letters, digits and _, beginning with a letter, at most {LONGEST}"
            raise invalid(f"'{name}' cannot be the name of a {what}", remedy, field)
    folded = [name.casefold() for name in names]
    for index, name in enumerate(folded):
        if name in folded[:index]:
            raise invalid(
                f"{what} '{names[index]}' is named twice", "upper and lower case count as the same", field
            )


def name_mixture_states(measurement: Any, mixture: Any) -> Any:
    """Return a mixture's states: its measurements, or for each measurement its categories, `color_0`, `color_1`."""
    count = cast(dict[str, Any], mixture).get("categories") if isinstance(mixture, dict) else None
    if count is None or not isinstance(measurement, list):
        return measurement
    names = [str(name) for name in cast(list[Any], measurement)]
    each = cast(list[Any], count) if isinstance(count, list) else [count] * len(names)
    if len(each) != len(names) or not all(isinstance(one, int) for one in each):
        return names  # later checks of the model refuse these names
    return [f"{name}_{code}" for name, one in zip(names, each, strict=True) for code in range(one)]


def as_floats(value: Any) -> Any:
    """Return a value in which whole numbers are floats, so that 1 and 1.0 are equal as JSON."""
    if isinstance(value, dict):
        return {key: as_floats(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [as_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def takes_steps(definition: Any) -> bool:
    """Return whether a definition contains a process that takes one step at each row."""
    if isinstance(definition, Mapping):
        return definition.get("kind") in ("explicit", "seasonal_dummy") or any(
            map(takes_steps, definition.values())
        )
    return isinstance(definition, list) and any(map(takes_steps, definition))
