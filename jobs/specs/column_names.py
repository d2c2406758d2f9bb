"""Map the column names of files to the plain names that tables and outputs use.

A spec may contain any column name of a file. Spark and Delta allow fewer names, and treat `Temp` and `temp` as equal.
So every name that is not plain gets a plain name. `files.names` of the spec maps the plain name to the file's column,
or to the columns that together make the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jobs.core.times import CLOCK_PARTS, DATE_PARTS
from jobs.specs.problems import invalid, suggest_word

FileColumns = str | list[str] | dict[str, str]
"""A column of the files. The time may also have several columns: a list of columns, or columns by part of the time."""

LONGEST = 128
"""Maximum length of a plain name."""
# Columns of the `filter` command's output besides key and time.
OUTPUT_COLUMNS = (
    "mean",
    "covariance",
    "log_likelihood",
    "nis",
    "flag",
    "mode_probabilities",
    "weights",
    "responsibilities",
    "smoothed_mean",
    "smoothed_covariance",
    "smoothed_mode_probabilities",
    "lagged_mean",
    "lagged_covariance",
    "lagged_age",
)
# Columns of the estimates table, whose names key columns must not have. `key` contains the key as text.
ESTIMATE_COLUMNS = (
    "correction",
    "event_time",
    "flags",
    "model_version",
    "generation",
    "batch_id",
    "innovation",
    "measured",
    "filter_state",
)
TIME_PARTS = ("date", *DATE_PARTS, *CLOCK_PARTS)
"""The parts of a time that a separate column can contain; in a column `hhmm`, 1730 means 17:30."""
_DATES = (
    {"date"},
    {"year"},
    {"year", "month"},
    {"year", "month", "day"},
    {"year", "quarter"},
    {"year", "day_of_year"},
    {"year", "week"},
)
_CLOCKS: tuple[set[str], ...] = (
    set(), {"time"}, {"hhmm"}, {"hour"}, {"hour", "minute"}, {"hour", "minute", "second"},
    {"minute_of_day"}, {"second_of_day"},
)  # fmt: skip
_PART_NAMES = {
    "date": "date day_date datum fecha data dato local_date date_local date_utc utc_date yyyymmdd yyyy_mm_dd",
    "time": "time clock time_of_day tod uhrzeit zeit hora heure ora tijd local_time time_local time_utc utc_time "
    "hh_mm hh_mm_ss",
    "year": "year yr yyyy yy jahr annee ano anno jaar",
    "quarter": "quarter qtr q quartal trimestre",
    "week": "week wk kw woche semana semaine settimana uke vecka iso_week isoweek week_of_year weeknumber week_number",
    "month": "month mon mo mnth monat mois mes mese maand",
    "day": "day dy dd dom day_of_month mday tag jour dia giorno dag",
    "day_of_year": "doy day_of_year yday julian_day jday",
    "hour": "hour hr hh h hours he hour_ending hourending hour_end hr_end hour_beginning hb hour_of_day period "
    "stunde std heures uur",
    "hhmm": "hhmm hrmn hrmin hhmn hour_minute hour_min",
    "minute": "minute min mi minutes mn nn",
    "second": "second sec ss s seconds secs sekunde",
    "minute_of_day": "minute_of_day minutes_of_day min_of_day minuteofday minutes_since_midnight",
    "second_of_day": "second_of_day seconds_of_day sec_of_day secondofday seconds_since_midnight",
}
_PART_OF = {name: part for part, names in _PART_NAMES.items() for name in names.split()}
# Fields that may refer to a column, besides the fields that list columns.
_REFERENCES = (
    "states", "process", "observation", "initial", "robust", "mixture", "modes", "monitor", "learn", "outputs",
    "source", "key_from_name",
)  # fmt: skip


def is_plain(name: str) -> bool:
    """Return whether a table can have a column with this name, so that the name is plain."""
    return name.isidentifier() and not name.startswith("_") and len(name) <= LONGEST


def make_plain_name(name: str) -> str:
    """Make a plain name for a column from the letters and digits of its name."""
    if is_plain(name):
        return name
    plain = re.sub(r"\W+", "_", name).strip("_")
    if plain[:1].isdigit():
        plain = f"c_{plain}"
    plain = plain[:LONGEST].rstrip("_")
    return plain if is_plain(plain) else "unnamed" if not name.strip() else "column"


def find_time_parts(columns: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the column of each part of a time that is split over several columns, by part.

    The parts in a list follow from the names of the columns, such as `year`, `Hour` or `HH`. If a list has two columns
    with other names, the first column is the date and the second the time of day.

    Raises:
        ValueError: the parts do not make a time, or do not follow from the names; the message contains a remedy.
    """
    if not isinstance(columns, Mapping):
        columns = _parse_part_names(columns)
    unknown = [part for part in columns if part not in TIME_PARTS]
    if unknown:
        hint = suggest_word(unknown[0], TIME_PARTS) or f"parts are {', '.join(TIME_PARTS)}"
        raise ValueError(f"'{unknown[0]}' is no part of a time; {hint}")
    clock = columns.keys() & CLOCK_PARTS.keys()
    if columns.keys() - clock not in _DATES or clock not in _CLOCKS:
        raise ValueError(
            f"{', '.join(columns)} do not make a time; give a date, or year, month and day, and with them a time, "
            "or hour, minute and second, or minute_of_day, or second_of_day"
        )
    return dict(columns)


def _parse_part_names(columns: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    rest: list[str] = []
    for column in columns:
        part = find_time_part(column)
        if part == "month" and "month" in found and column.casefold() == "mm":
            part = "minute"  # in YY MM DD hh mm, the second `mm` is the minute
        if part is None or part in found:
            rest.append(column)
        else:
            found[part] = column
    if len(columns) == 2 and len(rest) == 1 and rest[0] == columns[0] and "date" not in found:
        return {"date": rest[0], **found}
    if len(columns) == 2 and len(rest) == 1 and found.keys() <= {"date"}:
        return {**found, "time": rest[0]}
    if len(columns) == 2 and len(rest) == 2:
        return {"date": rest[0], "time": rest[1]}
    if rest:
        raise ValueError(
            f"the part of the time that '{rest[0]}' has is not known; name the parts, as in "
            "{date: DATE, hour: HE}: " + ", ".join(TIME_PARTS)
        )
    return found


def find_time_part(column: str) -> str | None:
    """Return the part of a time that a column's name means, or None."""
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"\(.*?\)|\[.*?\]", "", column).strip().casefold()).strip("_")
    if name == "mm":
        return "month" if column.strip("# ") == "MM" else "minute" if column == "mm" else None
    return _PART_OF.get(name)


def with_plain_names(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec's fields with a plain name in place of each column name that is not plain.

    `files.names` of the result maps each new plain name to the name in the file. A spec with only plain names is
    returned unchanged. Values of a wrong type stay unchanged, and the spec's checks report them.

    Raises:
        ValueError: the error of `problems.invalid`.
    """
    names = _Names(spec)
    result = dict(spec)
    if _is_texts(spec.get("key")):
        taken = {*OUTPUT_COLUMNS, *ESTIMATE_COLUMNS, *(["key"] if len(spec["key"]) > 1 else [])}
        result["key"] = [names.plain(name, "key", taken) for name in spec["key"]]
    time = spec.get("time")
    if isinstance(time, str):
        result["time"] = names.plain(time, "time", OUTPUT_COLUMNS)
    elif isinstance(time, list | dict) and time:
        result["time"] = None  # set last, so that its plain name differs from all other names
    for field in ("measurement", "control"):
        if _is_texts(spec.get(field)):
            result[field] = [names.plain(name, field) for name in spec[field]]
    for field, inner in (("duplicates", "id"), ("inputs", "columns")):
        section = spec.get(field)
        value = section.get(inner) if isinstance(section, dict) else None
        if isinstance(value, str):
            result[field] = {**cast(dict[str, Any], section), inner: names.plain(value, field)}
        elif isinstance(value, dict) and _is_texts(list(cast(dict[str, Any], value).values())):
            columns = {name: names.table(column) for name, column in cast(dict[str, str], value).items()}
            result[field] = {**cast(dict[str, Any], section), inner: columns}
    inputs = result.get("inputs")
    if isinstance(inputs, dict) and _is_texts(inputs.get("key")):
        result["inputs"] = {**inputs, "key": [names.changed.get(name, name) for name in inputs["key"]]}
    if "time" in result and result["time"] is None and time is not None:
        result["time"] = names.several(cast(Any, time))
    return names.applied(result)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value))


class _Names:
    """The plain names of a spec's columns: `changed` maps names in the files to different plain names."""

    def __init__(self, spec: dict[str, Any]) -> None:
        files = spec.get("files")
        given = files.get("names") if isinstance(files, dict) else None
        self.given: dict[str, Any] = dict(cast(dict[str, Any], given)) if isinstance(given, dict) else {}
        self.changed: dict[str, str] = {v: k for k, v in self.given.items() if isinstance(v, str)}
        self.used: dict[str, str] = {}
        self.kept = {name.casefold() for name in (*self.given, *_list_plain_names(spec))}

    def plain(self, name: str, field: str, taken: Iterable[str] = ()) -> str:
        """Return a column's plain name; if that name is in `taken`, put the field's name before it."""
        if name in self.given:
            self.used[name.casefold()] = name
            return name
        if name in self.changed:
            return self.changed[name]
        if self.used.get(name.casefold()) == name:
            return name  # the column is named twice, which the spec's checks refuse
        plain = make_plain_name(name)
        if plain.casefold() in {one.casefold() for one in taken}:
            plain = f"{field}_{plain}"
        if plain != name or plain.casefold() in self.used:
            plain = self._free(plain)
        self.used[plain.casefold()] = name
        if plain != name:
            self.changed[name] = plain
        return plain

    def table(self, name: str) -> str:
        """Return the plain name of a column in a table of inputs; a column of the files may have the same name."""
        if name in self.changed or is_plain(name):
            return self.changed.get(name, name)
        return self.plain(name, "inputs")

    def several(self, columns: list[str] | dict[str, str]) -> str:
        """Return the plain name of a time that is made from several columns, and record these columns."""
        one = list(columns.values()) if isinstance(columns, dict) else columns
        if not _is_texts(list(one)):
            raise invalid("must be names of columns", "put each in quotes", "time")
        if isinstance(columns, list) and len(columns) == 1:
            return self.plain(columns[0], "time", OUTPUT_COLUMNS)
        known = next((name for name, value in self.given.items() if value == columns), None)
        name = self._free("time") if known is None else known
        self.given[name] = columns
        return name

    def _free(self, plain: str) -> str:
        number, free = 2, plain
        while free.casefold() in self.used or free.casefold() in self.kept:
            free = f"{plain[: LONGEST - 4]}_{number}"
            number += 1
        return free

    def applied(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Return a spec in which all references to columns, and `files.names`, use the changed names."""
        names = {**{plain: name for name, plain in self.changed.items()}, **self.given}
        files = spec.get("files")
        if not names or not (files is None or isinstance(files, dict)):
            return spec
        odd = {name: plain for name, plain in self.changed.items() if name and not is_plain(name)}
        referring = {field: _replace_texts(spec[field], odd) for field in _REFERENCES if field in spec}
        if spec.get("key_from_name") in self.changed:
            referring["key_from_name"] = self.changed[spec["key_from_name"]]
        written = {**(files or {}), "names": names}
        if isinstance(units := written.get("units"), dict):
            by_name = cast(dict[str, Any], units)
            written["units"] = {self.changed.get(name, name): unit for name, unit in by_name.items()}
        return {**spec, **referring, "files": written}


def _list_plain_names(spec: dict[str, Any]) -> Iterable[str]:
    """Return the names of a spec's columns and inputs that are plain."""
    sections = [spec.get("key"), [spec.get("time")], spec.get("measurement"), spec.get("control")]
    for field, inner in (("duplicates", "id"), ("inputs", "columns")):
        section = spec.get(field)
        value = cast(dict[str, Any], section).get(inner) if isinstance(section, dict) else None
        sections.append(list(cast(Any, value)) if isinstance(value, dict) else [value])
    names = [name for one in sections if isinstance(one, list) for name in cast(list[Any], one)]
    return [name for name in names if isinstance(name, str) and is_plain(name)]


def _replace_texts(value: Any, names: Mapping[str, str]) -> Any:
    """Replace each text in a value that is a key of `names` by the name for that key."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: _replace_texts(item, names) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_replace_texts(item, names) for item in cast(list[Any], value)]
    return value
