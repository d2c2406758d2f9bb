"""Filter with several models of one system at once: interacting (IMM) or independent (MMAE).

A mode is a filter of any kind with mean and covariance in its state. All modes filter each row. The likelihood of the
row under each mode updates the modes' probabilities, and the estimate is the mixture of the modes' estimates. In the
IMM the system may change its mode from row to row, so each mode starts a row from a mixture of all modes.

References: Blom and Bar-Shalom (1988); Bar-Shalom, Li and Kirubarajan (2001), sections 11.6.2 (MMAE) and
11.6.6 (IMM); Magill (1965).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.filters import mixture_moments
from kalman.filters.mixture_moments import GaussianMoments, log_sum_exp, normalise_weights
from kalman.filters.prediction import predict_measurement
from kalman.filters.recursions import choose
from kalman.filters.state_layout import Flags, StateLayout, StepTarget, step_in_blocks
from kalman.filters.update import mask_present
from kalman.linalg.entries import Entry, Vector, is_zero, minus, plus
from kalman.linalg.packing import packed_size
from kalman.linalg.program import Program, Symbol, Tape
from kalman.models.angles import turn_angles
from kalman.models.columns import require_numbers
from kalman.models.structure import Parameter
from kalman.types import Array, Filter, Rows, Step

SEVERAL = ("imm", "mmae")


@dataclass(frozen=True)
class MultipleModels(StateLayout):
    """A mixture of filters over the same states.

    names, modes   names and filters of the M modes; a mode's state starts with mean and covariance
    start          probabilities of the modes at a key's first row
    floor          approximate lower bound of a probability, so that an unlikely mode can become likely again
    transition     (M, M) transition probabilities, each row sums to 1 (IMM); None means that the mode stays (MMAE)
    window         number of newest measured rows that determine the MMAE's probabilities; None means all rows
    own            key-specific parameters, with the values of a new key
    copies         pairs: a row of the field `parameters`, and the row of this state where a mode repeats the value

    The state holds the mixture's moments, the logs of the probabilities, the log-likelihoods in the window for each
    mode (newest first), the states of the modes, and key-specific parameters.
    """

    names: tuple[str, ...]
    modes: tuple[Filter, ...]
    start: tuple[float, ...]
    floor: float
    transition: tuple[tuple[float, ...], ...] | None = None
    window: int | None = None
    own: tuple[Parameter, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return self.modes[0].states

    @property
    def measurements(self) -> int:
        """Number of measured components."""
        return self.modes[0].measurements

    @property
    def controls(self) -> int:
        """Number of control inputs."""
        return self.modes[0].controls

    @property
    def periods(self) -> tuple[float, ...]:
        """Period of each measured component, 0 if it is not an angle; () without angles."""
        return getattr(self.modes[0], "periods", ())

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        n, M = len(self.states), len(self.modes)
        fields: dict[str, tuple[int, ...]] = {
            "mean": (n,),
            "covariance": (packed_size(n),),
            "log_probabilities": (M,),
        }
        if self.window is not None:
            fields["recent"] = (self.window * M,)
        for name, mode in zip(self.names, self.modes, strict=True):
            fields |= {f"{name}.{field}": shape for field, shape in mode.fields.items()}
        if self.own:
            fields["parameters"] = (sum(len(p.value) for p in self.own),)
        return fields

    def find_key_rows(self, name: str) -> list[int] | None:
        """Return the rows of the state that hold a key-specific parameter; None if all keys share the parameter."""
        at = self.parts[-1].stop
        for p in self.own:
            if p.name == name:
                return list(range(at, at + len(p.value)))
            at += len(p.value)
        return None

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Write key-specific parameters (d, K) into their field and into the states of the modes."""
        state = super().with_parameters(state, parameters)
        if self.copies:
            origins, ends = (list(rows) for rows in zip(*self.copies, strict=True))
            state[ends] = np.asarray(parameters)[origins]
        return state

    def extract_transitions(self, state: Array) -> Array:
        """Return the transition probabilities (M, M), or (M, M, K) if they are key-specific; state: (size, K)."""
        M = len(self.modes)
        rows = self.find_key_rows("transition")
        if rows is not None:
            return state[rows].reshape(M, M, -1)
        return np.eye(M) if self.transition is None else np.array(self.transition)

    @property
    def outputs(self) -> Mapping[str, int]:
        """The probability of each mode after the row."""
        return {"mode_probabilities": len(self.modes)}

    @cached_property
    def parts(self) -> list[slice]:
        """The slice of each mode's state within this state."""
        at = self.places["recent" if self.window is not None else "log_probabilities"].stop
        found: list[slice] = []
        for mode in self.modes:
            found.append(slice(at, at + mode.size))
            at = found[-1].stop
        return found

    @property
    def _gaussian(self) -> int:
        """Number of entries of a mean and a packed covariance together."""
        n = len(self.states)
        return n + packed_size(n)

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        state = np.zeros((self.size, keys))
        with np.errstate(divide="ignore"):
            logs = normalise_weights([np.log(a) for a in self.start], self.floor)
        state[self.places["log_probabilities"]] = np.array(logs)[:, None]
        begun = [mode.initial(keys) for mode in self.modes]
        for part, mode in zip(self.parts, begun, strict=True):
            state[part] = mode
        if self.own:
            state[self.parts[-1].stop :] = np.array([a for p in self.own for a in require_numbers(p.value)])[
                :, None
            ]
        gaussians = [self._moments(list(mode)) for mode in begun]
        mixed = mixture_moments.mix_moments([np.exp(a) for a in logs], gaussians)
        state[: self._gaussian] = np.array([*mixed.m, *mixed.P])
        return state

    @property
    def own_start(self) -> Any:
        """The start from columns, which all modes share, or None."""
        return getattr(self.modes[0], "own_start", None)

    def begun(self, state: Array, first: Flags, u: Array) -> tuple[Array, Flags]:
        """Start all modes and their mixture from columns; arguments and results are those of `StateLayout.begun`."""
        state, wrong = state.copy(), np.zeros(len(first), bool)
        for part, mode in zip(self.parts, self.modes, strict=True):
            state[part], bad = mode.begun(state[part], first, u)  # type: ignore[attr-defined]
            wrong |= bad
        weights = list(np.exp(state[self.places["log_probabilities"]][:, first]))
        gaussians = [self._moments(list(state[part][:, first])) for part in self.parts]
        with np.errstate(all="ignore"):  # an invalid initial distribution is flagged
            mixed = mixture_moments.mix_moments(weights, gaussians)
        state[: self._gaussian, first] = np.array([*mixed.m, *mixed.P])
        return state, wrong

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K).

        All modes get these moments; the probabilities are the initial probabilities (`start`).
        """
        state = super().from_moments(mean, covariance)
        for part, mode in zip(self.parts, self.modes, strict=True):
            state[part] = mode.from_moments(mean, covariance)
        return state

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return the mean (m, K) and packed covariance of a measurement of these states (size, K)."""
        weights = list(np.exp(state[self.places["log_probabilities"]]))
        found = [
            predict_measurement(mode, state[part], u)
            for mode, part in zip(self.modes, self.parts, strict=True)
        ]
        expected = [
            GaussianMoments(turn_angles(self.periods, list(mean), list(found[0][0])), list(P))
            for mean, P in found
        ]
        mixed = mixture_moments.mix_moments(weights, expected)
        return np.array(mixed.m), np.array(mixed.P)

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`.

        Log-likelihood and NIS are those of the mixture with the probabilities before the row, so the NIS is on average
        the number of measured components. The probability of a mode that fails falls to the floor (with a window, its
        likelihood is `floor` times the best likelihood), and the mode restarts from the mixture of the other modes. If
        all modes fail, the key gets the first mode's flag.
        """
        return step_in_blocks(state, rows, self.outputs, self._step_block)

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        presents, first = mask_present(rows.y), rows.mask_first_rows()
        keys, M = state.shape[1], len(self.modes)
        after, before, chances = target.state, state, state[self.places["log_probabilities"]]
        after[self.parts[-1].stop :] = state[self.parts[-1].stop :]
        if self.transition is not None and first is not True:
            before, chances = self.mixed(state, first)
        unmeasured = rows._replace(y=np.full_like(rows.y, np.nan))
        predicted = rows._replace(first=np.ones(keys, bool))  # first rows skip the prediction
        scores = np.empty((M, keys))
        failed, codes = np.empty((M, keys), bool), np.empty((M, keys), np.uint8)
        expected: list[tuple[Array, Array]] = []
        for j, (mode, part) in enumerate(zip(self.modes, self.parts, strict=True)):
            moved, prediction = mode.step(before[part], unmeasured)
            expected.append(predict_measurement(mode, moved, rows.u))
            after[part], update = mode.step(moved, predicted)
            codes[j] = np.where(prediction.flag != flags.WELL, prediction.flag, update.flag)
            failed[j] = codes[j] != flags.WELL
            scores[j] = update.log_likelihood
        failing, y = bool(failed.any()), rows.y
        if self.periods:
            expected, y = self._turn_expected(expected, failed, y)
        program = combine_program(self, presents[0] is not None, failing)
        recent = state[self.places["recent"]] if self.window is not None else ()
        gaussians = [after[part][: self._gaussian] for part in self.parts]
        inputs = [
            *chances,
            *scores,
            *recent,
            *state[_start_rows(self)],
            *(row for pair in expected for a in pair for row in a),
        ]
        inputs += [*(row for a in gaussians for row in a), *y]
        masks = [*(failed if failing else ()), *(has for has in presents if has is not None)]
        out = np.empty((M * self._gaussian if failing else 0, keys))
        check = np.empty(keys)
        front = self.parts[0].start
        outputs = [
            *after[:front],
            target.log_likelihood,
            target.nis,
            *target.extra["mode_probabilities"],
            check,
            *out,
        ]
        program([*inputs, *masks], np.empty((program.buffers, keys)), outputs)
        if failing:
            for j, part in enumerate(self.parts):
                after[part][: self._gaussian] = out[j * self._gaussian : (j + 1) * self._gaussian]
        good = ~failed.all(axis=0)
        if not (good.all() and np.isfinite(check).all()):
            left = np.where(np.isfinite(check), flags.WELL, flags.OVERFLOW)
            target.leave(state, np.where(good, left, codes[0]).astype(np.uint8))

    def _turn_expected(
        self, expected: list[tuple[Array, Array]], failed: npt.NDArray[np.bool_], y: Array
    ) -> tuple[list[tuple[Array, Array]], Array]:
        """Return the modes' expected measurements and y (m, K), with angles moved near the first sound mode's."""
        centre = expected[-1][0]
        for (mean, _), bad in zip(expected[-2::-1], failed[-2::-1], strict=True):
            centre = np.where(bad, centre, mean)
        turned = [
            np.array(turn_angles(self.periods, list(a), list(centre))) for a in (y, *(e[0] for e in expected))
        ]
        return [(mean, P) for mean, (_, P) in zip(turned[1:], expected, strict=True)], turned[0]

    def mixed(self, state: Array, first: Any) -> tuple[Array, Array]:
        """Return the states with mixed moments in each mode, and the logs of the probabilities before the row."""
        keys, M, size = state.shape[1], len(self.modes), self._gaussian
        program = build_mix_program(self, isinstance(first, np.ndarray))
        before, chances = state.copy(), np.empty((M, keys))
        inputs = [*state[self.places["log_probabilities"]], *state[self.find_key_rows("transition") or []]]
        inputs += [row for part in self.parts for row in state[part][:size]]
        masks = [first] if isinstance(first, np.ndarray) else []
        outputs = [*chances, *(row for part in self.parts for row in before[part][:size])]
        program([*inputs, *masks], np.empty((program.buffers, keys)), outputs)
        return before, chances

    def _moments(self, entries: Sequence[Any]) -> GaussianMoments:
        n = len(self.states)
        return GaussianMoments(entries[:n], entries[n : self._gaussian])


class ModeUpdates(NamedTuple):
    """The results of updating all modes with one row; each field has one entry for each mode.

    logs            logs of the probabilities before the row
    log_likelihoods log-likelihoods of the row
    failed          masks of the keys at which the mode failed; None if no mode failed
    expected        predicted mean and covariance of the measurement
    moments         mean and covariance after the row
    """

    logs: Vector
    log_likelihoods: Vector
    failed: Sequence[Any] | None
    expected: Sequence[GaussianMoments]
    moments: Sequence[GaussianMoments]


class Combined(NamedTuple):
    """The mixture after a row; logs: logs of the probabilities; restarted: the modes' moments, () if no mode failed."""

    mixed: GaussianMoments
    logs: list[Entry]
    recent: list[Entry]
    log_likelihood: Entry
    nis: Entry
    restarted: list[GaussianMoments]


def mix_modes(
    transition: Sequence[Sequence[Entry]], logs: Vector, modes: Sequence[GaussianMoments]
) -> tuple[list[Entry], list[GaussianMoments]]:
    """Return each mode's log-probability before the row and its mixed initial moments.

    References: Bar-Shalom, Li and Kirubarajan (2001), equations 11.6.6-7 to 11.6.6-9.
    """
    chances: list[Entry] = []
    result: list[GaussianMoments] = []
    for j, own in enumerate(modes):
        joint = [
            (plus(_take_log(row[j]), a), mode)
            for row, a, mode in zip(transition, logs, modes, strict=True)
            if not is_zero(row[j])
        ]
        if not joint:  # no transition leads to this mode
            chances.append(-np.inf)
            result.append(own)
            continue
        chances.append(log_sum_exp([a for a, _ in joint]))
        if len(joint) == 1:
            result.append(joint[0][1])
            continue
        weights = [np.exp(minus(a, chances[j])) for a, _ in joint]
        result.append(mixture_moments.mix_moments(weights, [mode for _, mode in joint]))
    return chances, result


def _take_log(a: Entry) -> Entry:
    return float(np.log(a)) if isinstance(a, float) else np.log(a)


def _start_rows(model: MultipleModels) -> list[int]:
    """Return the state's rows with key-specific initial probabilities; only a filter with a window needs them."""
    return [] if model.window is None else model.find_key_rows("initial.mode_probabilities") or []


def combine_modes(
    model: MultipleModels,
    modes: ModeUpdates,
    recent: Vector,
    y: Vector,
    presents: Sequence[Any],
    start: Sequence[Entry] = (),
) -> Combined:
    """Return the mixture after a row.

    recent: log-likelihoods of the earlier rows in the window, newest first; start: key-specific initial probabilities,
    if there are any.
    """
    failed = modes.failed
    # only modes that did not fail contribute to the expected measurement
    logs = normalise_weights(_exclude_failed(failed, modes.logs))
    expected = mixture_moments.mix_moments([np.exp(a) for a in logs], _zero_failed(failed, modes.expected))
    joint = [
        plus(a, b) for a, b in zip(modes.logs, _exclude_failed(failed, modes.log_likelihoods), strict=True)
    ]
    log_likelihood = log_sum_exp(joint)
    measured_any: Any = None
    if presents[0] is not None:
        measured_any = presents[0]
        for has in presents[1:]:
            measured_any = measured_any | has
        log_likelihood = np.where(measured_any, log_likelihood, 0.0)
    if model.window is None:
        rows: list[Entry] = []
        logs = normalise_weights(joint, model.floor)
    else:
        rows, logs = _slide_window(model, modes, recent, measured_any, start or model.start)
    weights = [np.exp(a) for a in normalise_weights(_exclude_failed(failed, logs))]
    whole = mixture_moments.mix_moments(weights, _zero_failed(failed, modes.moments))
    restarted = [
        GaussianMoments(choose(bad, whole.m, mode.m), choose(bad, whole.P, mode.P))
        for bad, mode in zip(failed or (), modes.moments, strict=False)
    ]
    nis = mixture_moments.nis(y, expected, presents)
    return Combined(whole, logs, rows, log_likelihood, nis, restarted)


def _slide_window(
    model: MultipleModels, modes: ModeUpdates, recent: Vector, measured_any: Any, start: Sequence[Entry]
) -> tuple[list[Entry], list[Entry]]:
    """Return the window's log-likelihoods including this row, newest first, and the logs of the probabilities."""
    scores = modes.log_likelihoods
    if modes.failed is not None:  # a log-likelihood stays in the window, so it must be finite
        best: Entry = -np.inf
        for a in _exclude_failed(modes.failed, scores):
            best = np.maximum(best, a)
        least = plus(best, float(np.log(model.floor)))
        scores = [np.where(bad, least, a) for bad, a in zip(modes.failed, scores, strict=True)]
    rows = [*scores, *recent[: -len(scores)]]
    if measured_any is not None:
        rows = choose(measured_any, rows, recent)
    sums: list[Entry] = [-np.inf if is_zero(a) else _take_log(a) for a in start]
    for j in range(len(scores)):
        for entry in rows[j :: len(scores)]:
            sums[j] = plus(sums[j], entry)
    return rows, normalise_weights(sums, model.floor)


def _exclude_failed(failed: Sequence[Any] | None, logs: Vector) -> Vector:
    """Return the logs with -inf for failed modes."""
    if failed is None:
        return logs
    return [np.where(bad, -np.inf, a) for bad, a in zip(failed, logs, strict=True)]


def _zero_failed(failed: Sequence[Any] | None, parts: Sequence[GaussianMoments]) -> Sequence[GaussianMoments]:
    """Return the moments with zeros for failed modes, so that a weight of 0 removes a failed mode without NaN."""
    if failed is None:
        return parts
    return [
        GaussianMoments([np.where(bad, 0.0, a) for a in part.m], [np.where(bad, 0.0, a) for a in part.P])
        for bad, part in zip(failed, parts, strict=True)
    ]


@lru_cache(maxsize=64)
def build_mix_program(model: MultipleModels, some_first: bool) -> Program:
    """Return the program that mixes the modes before a row; some_first: whether any key is at its first row.

    Outputs: the logs of the probabilities, then each mode's mean and covariance.
    """
    assert model.transition is not None
    tape, M = Tape(), len(model.modes)
    logs = tape.symbols(M)
    own = tape.symbols(len(model.find_key_rows("transition") or ()))
    entries = [tape.symbols(model._gaussian) for _ in range(M)]
    transition: Sequence[Sequence[Entry]] = model.transition
    if own:  # a transition of probability 0 in the shared matrix stays impossible
        pairs = zip(transition, (own[i * M : (i + 1) * M] for i in range(M)), strict=True)
        transition = [[b if a > 0.0 else 0.0 for a, b in zip(row, rows, strict=True)] for row, rows in pairs]
    chances, begun = mix_modes(transition, logs, [model._moments(a) for a in entries])
    is_first: Any = tape.symbol(boolean=True) if some_first else None
    if is_first is not None:
        chances = choose(is_first, logs, chances)
        begun = [
            GaussianMoments(
                choose(is_first, own[: len(part.m)], part.m), choose(is_first, own[len(part.m) :], part.P)
            )
            for own, part in zip(entries, begun, strict=True)
        ]
    inputs = [*logs, *own, *(a for part in entries for a in part), *([is_first] if some_first else [])]
    return Program(tape, inputs, [*chances, *(a for part in begun for a in (*part.m, *part.P))])


@lru_cache(maxsize=64)
def combine_program(model: MultipleModels, missing: bool, failing: bool) -> Program:
    """Return the program that combines the modes' updates.

    missing: whether any key lacks a component; failing: whether any mode failed. Outputs: the state up to the modes'
    states, log-likelihood, NIS, probabilities, a number that is finite if the other outputs are, and (if `failing`)
    each mode's mean and covariance.
    """
    tape, M, m = Tape(), len(model.modes), model.measurements
    logs, scores = tape.symbols(M), tape.symbols(M)
    recent = tape.symbols((model.window or 0) * M)
    start = tape.symbols(len(_start_rows(model)))
    expected = [GaussianMoments(tape.symbols(m), tape.symbols(packed_size(m))) for _ in range(M)]
    modes = [model._moments(tape.symbols(model._gaussian)) for _ in range(M)]
    y = tape.symbols(m)
    failed = tape.symbols(M, boolean=True) if failing else None
    presents: list[Any] = tape.symbols(m, boolean=True) if missing else [None] * m
    end = combine_modes(model, ModeUpdates(logs, scores, failed, expected, modes), recent, y, presents, start)
    total = end.log_likelihood
    for entry in (*end.mixed.m, *end.mixed.P, *end.logs):
        total = total + entry
    inputs = [*logs, *scores, *recent, *start]
    inputs += [a for part in (*expected, *modes) for a in (*part.m, *part.P)]
    inputs += [*y, *(failed or ()), *(has for has in presents if isinstance(has, Symbol))]
    outputs = [*end.mixed.m, *end.mixed.P, *end.logs, *end.recent, end.log_likelihood, end.nis]
    outputs += [*(np.exp(a) for a in end.logs), total]
    outputs += [a for part in end.restarted for a in (*part.m, *part.P)]
    return Program(tape, inputs, outputs)
