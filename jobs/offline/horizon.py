"""How far to forecast: the options, the spec's section `forecast`, and the resulting times. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.times import MAX_US, TimeParser, load_zone, parse_duration_us
from jobs.offline.calendar_steps import LONGEST, SHORTEST, CalendarStep, parse_calendar_step
from jobs.specs.model_spec import ModelSpec, takes_steps
from jobs.specs.monitor import ForecastSkill

Ints = NDArray[np.int64]
MAX_FORECASTS = 50_000_000
"""The maximum number of forecasts. A much too short step then gives an error instead of exhausting the memory."""


class Horizon(NamedTuple):
    """How far to forecast: `steps` steps, or until the time `end`; times in microseconds.

    length: the length of a step. With a file of future rows, each row is a step unless a length is given; without steps
        and end, all rows are forecast.
    direct: the spec's horizons, each reached by one step.
    multiples: the spec's horizons as numbers of steps of `length`, for a process with one step per row.
    calendar: a step by the calendar, in place of `length`.
    """

    steps: int | None = None
    end: int | None = None
    length: int | None = None
    direct: tuple[int, ...] = ()
    multiples: tuple[int, ...] = ()
    calendar: CalendarStep | None = None

    def count_steps(self, earliest: int) -> int:
        """Return the largest number of steps of a key, without a file of future rows.

        earliest: the earliest of the times of the keys' newest rows.
        """
        length = self.calendar.months * SHORTEST if self.calendar else self.length
        if self.end is not None and length is not None:
            return max((self.end - earliest) // length, 1)
        return max(self.steps or 1, len(self.direct), *self.multiples, 1)


class ForecastRequest(NamedTuple):
    """The request for forecasts into a file or a table.

    keys: keys as text; an empty list means all keys.
    snapshot: None, an id or `newest`.
    future: a file of future rows.
    inputs: a file of the keys' inputs.
    output: a file or a table; None means the model's table.
    run: the id of the rows in a table; None means an id that follows from the states and the request.
    all_columns: whether a file also has the states, the covariances and the flag, as a table has.
    """

    horizon: Horizon
    probability: float
    keys: Sequence[str] = ()
    snapshot: str | None = None
    future: str | None = None
    inputs: str | None = None
    output: str | None = None
    run: str | None = None
    all_columns: bool = False


class ForecastSteps(NamedTuple):
    """The steps of K keys after their newest rows; a key with fewer than S steps repeats its last step.

    time: (S, K) microseconds.
    wanted: (S, K) whether the step is put out.
    u: (S, c, K) inputs, or None.
    length: microseconds of a step, or a step by the calendar; None means that steps have no common length.
    """

    time: Ints
    wanted: NDArray[np.bool_]
    u: NDArray[np.float64] | None
    length: int | CalendarStep | None


def parse_horizon(
    spec: ModelSpec,
    steps: int | None,
    until: str | None,
    every: str | None,
    probability: float,
    future: str | None = None,
    with_rows: bool = True,
) -> Horizon:
    """Check a command's options and return the requested horizon.

    Args:
        spec: the spec of the model.
        steps, until, every, probability: the options.
        future: a file of future inputs, whose rows are the steps unless `every` is given.
        with_rows: whether the rows of a file are forecast, which show the usual length of a step. Otherwise `every`
            must be given, and the default horizons are those of the spec's section `forecast`.

    Raises:
        UserError: the options contradict each other, or the model needs future inputs and none are given.
    """
    _check_future(spec, future)
    unsaid = steps is None and until is None and future is None
    if unsaid and not with_rows:
        _check_probability(probability)
        return _read_section(spec, every)
    if (steps is not None and until is not None) or unsaid:
        raise UserError("give either --steps or --until")
    if every is not None and steps is None and until is None:
        raise UserError("--every: with --future, say how far with --steps or --until, or leave it out")
    _check_probability(probability)
    end = length = None
    if not with_rows and steps is not None and every is None and future is None:
        every = None if spec.forecast is None else spec.forecast.step
        if every is None:
            raise UserError(
                "--steps: add --every with the time of a step, such as 1h or 1mo: a state does not tell it"
            )
    calendar = None if every is None else parse_calendar_step(every, spec.time_zone)
    if calendar is not None and future is not None:
        raise UserError("--every: takes no months with --future, whose rows are the steps: leave it out")
    if every is not None and calendar is None:
        try:
            length = parse_duration_us(every)
        except ValueError as error:
            raise UserError(
                f"--every: {error}; write a number and one of ms, s, min, h, d, w, mo, q, y, such as 1h"
            ) from error
    if until is not None:
        end = TimeParser(None, load_zone(spec.time_zone))(until)
        if end is None:
            raise UserError(f"--until: {until!r} is not a time; write one such as 2024-01-31T17:00")
        if every is None and future is None and takes_steps(spec.definition()):
            raise UserError(
                f"--until: {spec.name} has an explicit process, which takes one step a row whatever the time; "
                "add --every with the time of a step"
            )
    return Horizon(steps, end, length, calendar=calendar)


def _check_probability(probability: float) -> None:
    if not 0.0 < probability < 1.0:
        raise UserError(f"--probability: {probability:g} is not between 0 and 1; give one such as 0.95")


def _read_section(spec: ModelSpec, every: str | None) -> Horizon:
    """Return the horizons of the spec's section `forecast`, which `skill` scores."""
    section = spec.forecast
    if section is None:
        raise UserError(
            f"give --steps with --every, or --until; without them the horizons are those of the spec's section "
            f"`forecast`, and {spec.name} has none"
        )
    if every is not None:
        raise UserError("--every: say how far with --steps or --until, or leave it out")
    steps = count_section_steps(spec, section)
    if steps is None or section.step is None:
        return Horizon(direct=tuple(sorted(section.lengths)))
    return Horizon(length=parse_duration_us(section.step), multiples=tuple(sorted(steps)))


def count_section_steps(spec: ModelSpec, section: ForecastSkill) -> tuple[int, ...] | None:
    """Return the number of steps of each horizon of a section `forecast`; None for a model in continuous time.

    Raises:
        UserError: the process takes one step a row, and the section does not give the time of a step.
    """
    if not takes_steps(spec.definition()):
        return None
    if section.step is None:
        raise UserError(
            f"{spec.source_path or spec.name}: forecast.step: is missing: the process takes one step a row, whatever "
            f"the time; give the time of a step, such as 1h"
        )
    step = parse_duration_us(section.step)
    return tuple(length // step for length in section.lengths)


def _check_future(spec: ModelSpec, future: str | None) -> None:
    if spec.control and future is None:
        raise UserError(
            f"{spec.name} has control inputs: give their future values with --future FILE, a row for each key and time "
            f"with the columns {', '.join([*spec.key, spec.time, *spec.control])}"
        )
    if future is not None and not spec.control and spec.inputs is None:
        raise UserError(f"--future: {spec.name} takes no inputs: leave the option out")


def plan_steps(last: Ints, horizon: Horizon, typical: int | CalendarStep | None) -> ForecastSteps:
    """Return the steps of K keys at the times of a horizon, without inputs; no keys give no steps.

    Args:
        last: (K,) time of each key's newest row.
        horizon: how far to forecast.
        typical: a step, in microseconds or by the calendar, used if the horizon has none.

    Raises:
        UserError: there are too many steps, or they reach too far.
    """
    end, length = horizon.end, horizon.calendar or horizon.length
    if not len(last):
        return ForecastSteps(np.empty((0, 0), np.int64), np.empty((0, 0), bool), None, length)
    if horizon.direct:
        _check_size(len(horizon.direct) * len(last), int(last.max()) + max(horizon.direct))
        time = last + np.array(horizon.direct, np.int64)[:, None]
    elif end is not None and length is None:
        return ForecastSteps(np.maximum(last, end)[None], (last <= end)[None], None, None)
    else:
        length = length or typical
        assert length is not None
        count = horizon.count_steps(int(last.min()))
        longest = length.months * LONGEST if isinstance(length, CalendarStep) else length
        _check_size(count * len(last), int(last.max()) + longest * count)
        if isinstance(length, CalendarStep):
            time = length.add(last, count)
        else:
            time = last + length * np.arange(1, count + 1)[:, None]
    if end is not None:
        return ForecastSteps(time, time <= end, None, length)
    number = np.arange(1, len(time) + 1)
    wanted = np.isin(number, horizon.multiples) if horizon.multiples else np.ones(len(time), bool)
    return ForecastSteps(time, np.repeat(wanted[:, None], len(last), axis=1), None, length)


def _check_size(forecasts: int, newest: int) -> None:
    if forecasts > MAX_FORECASTS:
        raise UserError(
            f"these are {forecasts:,} forecasts, and {MAX_FORECASTS:,} are the most; take fewer or longer steps"
        )
    if newest > MAX_US:
        raise UserError("the last step is after the year 9999; take fewer or shorter steps")
