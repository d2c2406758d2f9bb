"""The structures that `init` tries: fit them to the sample, rank them, and fit the chosen ones.

Each structure models one measurement; several are composed into one model. The first fit is a grid over noise ratios.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.ranking import Ranking, choose, rank
from jobs.choosing.rhythm import CYCLES, Rhythm, Season
from jobs.choosing.samples import Fitted, SampledSeries, SplitRows, score_held_out
from jobs.core.errors import UserError
from jobs.core.times import UNIT_US
from kalman.linalg.packing import unpack_symmetric
from kalman.types import Filter, Rows

LEVEL = "level"
ROBUST = " robust"
"""The suffix of the name of a structure with robust updates."""
STUDENT_T: dict[str, Any] = {"student_t": {"degrees": 4.0}}
HUBER: dict[str, Any] = {"huber": {"threshold": 1.345}}


class ProcessPart(NamedTuple):
    """A part of a process: name within the model, definition, states, row of H for these states, learned numbers.

    powers: for each learned number, the power of the measurement's unit in it: 2 for a variance, 0 for a rate.
    """

    name: str
    process: dict[str, Any]
    states: tuple[str, ...]
    observes: tuple[float, ...]
    learned: tuple[str, ...]
    powers: tuple[int, ...]


class CandidateStructure(NamedTuple):
    """A structure for one measurement: its name and its parts."""

    name: str
    parts: tuple[ProcessPart, ...]


def list_structures(rhythm: Rhythm, season: Season | None) -> list[CandidateStructure]:
    """Return the structures to try, the simplest first, for measurements of standard size 1.

    With the start values of the variances, about half of a step is noise and half is movement.
    """
    step = rhythm.step_in_units
    level = ProcessPart(
        "level", {"kind": "random_walk", "variance": 0.5 / step}, ("level",), (1.0,), ("variance",), (2,)
    )
    variances = {"level_variance": 0.4 / step, "slope_variance": 1e-3 / step**3}
    trend = ProcessPart(
        "trend",
        {"kind": "local_linear_trend", **variances},
        ("level", "slope"),
        (1.0, 0.0),
        ("level_variance", "slope_variance"),
        (2, 2),
    )
    damped = trend._replace(
        process={"kind": "damped_trend", **variances, "damping": 0.1 / step},
        learned=(*trend.learned, "damping"),
        powers=(2, 2, 0),
    )
    found = [
        CandidateStructure(LEVEL, (level,)),
        CandidateStructure("trend", (trend,)),
        CandidateStructure("damped", (damped,)),
    ]
    if season is None:
        return found
    waves = _build_season(season, rhythm)
    return [
        *found,
        CandidateStructure("season", (level, waves)),
        CandidateStructure("trend season", (trend, waves)),
    ]


def _build_season(season: Season, rhythm: Rhythm) -> ProcessPart:
    """Return the part of a process with the waves of a season."""
    process = {
        "kind": "seasonal_trigonometric",
        "period": float(f"{season.period / UNIT_US[rhythm.unit]:.8g}"),
        "harmonics": season.harmonics,
        "variance": 1e-4 / rhythm.step_in_units,
    }
    letters = "abcdefgh"[: season.harmonics]
    states = tuple(f"{part}_{letter}" for letter in letters for part in ("wave", "turn"))
    return ProcessPart("season", process, states, (1.0, 0.0) * season.harmonics, ("variance",), (2,))


class Composed(NamedTuple):
    """A model of several measurements, as the fields of a definition.

    powers: for each learned number of the process, the measurement whose unit the number has, and the unit's power.
    """

    states: list[str]
    process: dict[str, Any]
    H: list[list[float]]
    R: list[list[float]]
    learned: list[str]
    powers: list[tuple[int, int]]


def compose(measurements: Sequence[str], chosen: Sequence[CandidateStructure]) -> Composed:
    """Compose one structure per measurement into one model."""
    alone = len(measurements) == 1
    states: list[str] = []
    parts: list[dict[str, Any]] = []
    learned: list[str] = []
    powers: list[tuple[int, int]] = []
    rows: list[list[float]] = [[] for _ in measurements]
    whole = alone and len(chosen[0].parts) == 1
    for m, (measurement, structure) in enumerate(zip(measurements, chosen, strict=True)):
        for part in structure.parts:
            prefix = "" if alone else f"{measurement}_"
            name = f"{prefix}{part.name}"
            states += [f"{prefix}{state}" for state in part.states]
            parts.append({"name": name, **part.process})
            learned += [one if whole else f"{name}.{one}" for one in part.learned]
            powers += [(m, power) for power in part.powers]
            for other, row in enumerate(rows):
                row += part.observes if other == m else (0.0,) * len(part.observes)
    process = dict(chosen[0].parts[0].process) if whole else {"kind": "sum", "parts": parts}
    R = [[0.5 if i == j else 0.0 for j in range(len(rows))] for i in range(len(rows))]
    return Composed(states, process, rows, R, [*learned, "R"], powers)


def build_definition(
    composed: Composed, measurements: Sequence[str], robust: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the definition for `kalman.build`, with parameters that are learned per key."""
    observation: dict[str, Any] = {"R": composed.R}
    if len(measurements) > 1:  # for one measurement H follows from the process
        observation["H"] = composed.H
    return {
        "filter": "linear",
        "states": list(composed.states),
        "measurement": list(measurements),
        "process": composed.process,
        "observation": observation,
        "initial": {"diffuse": True},
        "learn": {"parameters": list(composed.learned), "scope": "key"},
        **({} if robust is None else {"robust": robust}),
    }


Floats = NDArray[np.float64]

GRIDS: dict[str, tuple[float, ...]] = {
    "variance": (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 2.0, 10.0, 1e2, 1e4),
    "level_variance": (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3),
    "slope_variance": (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
    "damping": (0.02, 0.1, 0.5),
    "season.variance": (0.0, 1e-6, 1e-4, 1e-2),
}
"""The first grid points of each number: a variance per step relative to the measurement noise, or a rate per step."""
STEPS = {"slope_variance": 3}
"""The power of the step by which a number is scaled, if it is not 1."""
FIRST, FACTOR = 0.5, 0.5
"""The distance (power of ten) of the first finer grid's points from the best point, and the factor for each next grid's
distance.
"""
LOWEST, HIGHEST = 1e-10, 1e8
SMALLER = tuple(product((1.0, 0.3, 0.1, 0.03, 0.01), (3.0, 0.3, 0.03)))
"""Start points of the search with a robust likelihood: factors on the noise and on the other variances."""
MOVING = 1e-2
"""In this search, the start value for a variance of zero, relative to the noise: large noise can hide all movement."""
WIDTH = 20_000
"""The number of series times points that are filtered at once."""


class GridFit(NamedTuple):
    """The best point of each of K series.

    parameters: (d, K), the argument of `with_parameters`.
    at_zero: (K,) whether a variance is zero.
    """

    parameters: Floats
    at_zero: NDArray[np.bool_]


class _Rounds(NamedTuple):
    """The rows of K series, the longest first, in rounds: dt, y and jump of the i-th row of each series."""

    keys: NDArray[np.int64]
    rounds: list[tuple[Floats, Floats, NDArray[np.bool_]]]


def fit_grid(structure: CandidateStructure, sample: SplitRows, step: float, finer: int) -> GridFit:
    """Fit a structure to each series of one measurement.

    Args:
        structure: structure with p ratios.
        sample: series with measurements of standard size; held-out rows count too.
        step: usual step, in the unit of time.
        finer: number of grid refinements; each one halves the error of a ratio's logarithm.
    """
    composed = compose(["y"], [structure])
    model = kalman.build(build_definition(composed, ["y"]))
    names = [
        f"season.{one}" if part.name == "season" else one for part in structure.parts for one in part.learned
    ]
    counted = np.array([step ** STEPS.get(name, 1) for name in names])
    powers = np.array([power for _, power in composed.powers])
    plan = _split_rounds(sample)

    def likelihoods(points: Floats) -> tuple[Floats, Floats]:
        """Return the log-likelihood (K, C) and the scale (K, C) at C points (p, K, C) of each series."""
        whole = np.concatenate([points / counted[:, None, None], np.ones((1, *points.shape[1:]))])
        return _concentrate_scale(*_evaluate(model, plan, whole))

    first = np.array(list(product(*(GRIDS[name] for name in names)))).T
    best, scale = _climb(np.repeat(first[:, None, :], sample.keys, axis=1), likelihoods, finer)
    variances = np.where(powers[:, None] == 2, scale, 1.0)
    parameters = np.concatenate([best / counted[:, None] * variances, scale[None]])
    return GridFit(parameters, (best == 0.0).any(axis=0))


def fit_robust(
    structure: CandidateStructure,
    sample: SplitRows,
    plain: GridFit,
    robust: dict[str, Any],
    finer: int,
) -> GridFit:
    """Fit a structure with robust updates to each series by the robust likelihood, starting from the Gaussian fit.

    Args:
        structure, sample, finer: as in `fit_grid`.
        plain: the result of `fit_grid`.
        robust: options of the robust updates.
    """
    composed = compose(["y"], [structure])
    model = kalman.build(build_definition(composed, ["y"], robust))
    plan = _split_rounds(sample)
    noise, others = np.array(SMALLER).T
    factors = np.array([np.where(power == 2, others, 1.0) for _, power in composed.powers] + [noise])
    step = np.median(np.maximum(np.diff(sample.rows.time), 1)) / sample.unit  # few steps are between keys
    moving = np.where(plain.parameters > 0, plain.parameters, MOVING * plain.parameters[-1] / step)
    points = np.concatenate([plain.parameters[..., None], moving[..., None] * factors[:, None]], axis=2)
    best, _ = _climb(points, lambda some: _evaluate(model, plan, some)[:2], finer)
    return GridFit(best, (best[:-1] == 0.0).any(axis=0))


def _climb(
    points: Floats, evaluate: Callable[[Floats], tuple[Floats, Floats]], finer: int
) -> tuple[Floats, Floats]:
    """Return each series' best point (p, K) and its scale, from points (p, K, C) and finer grids around the best point.

    evaluate: a function that returns the log-likelihood and the scale (K, C) at points.
    """
    best, value, scale = _select_best(points, *evaluate(points))
    for turn in range(finer):
        points = _build_points_around(best, FIRST * FACTOR**turn)
        other, higher, wide = _select_best(points, *evaluate(points))
        better = higher > value
        best, scale = np.where(better, other, best), np.where(better, wide, scale)
        value = np.maximum(value, higher)
    return best, scale


def _build_points_around(best: Floats, reach: float) -> Floats:
    """Return the points (p, K, 3^p) around the best points (p, K): a factor up and down, or a little above zero."""
    factor = 10.0**reach
    p = len(best)
    up = np.where(best > 0, np.minimum(best * factor, HIGHEST), 1e-7)
    down = np.where(best > 0, np.maximum(best / factor, LOWEST), 1e-8)
    three = np.stack([best, up, down], axis=-1)  # (p, K, 3)
    chosen = np.array(list(product(range(3), repeat=p))).T  # (p, 3^p)
    return np.stack([three[i][:, chosen[i]] for i in range(p)])


def _select_best(points: Floats, value: Floats, scale: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each series' best point (p, K), and the point's log-likelihood (K,) and scale (K,)."""
    at = np.argmax(value, axis=1)
    series = np.arange(len(at))
    return points[:, series, at], value[series, at], scale[series, at]


def _split_rounds(sample: SplitRows) -> _Rounds:
    rows = sample.rows
    from_last = np.diff(rows.time, prepend=rows.time[:1]) / sample.unit
    jump = np.zeros(len(rows.key), bool) if sample.jump is None else sample.jump
    first = np.diff(rows.key, prepend=-1) != 0
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=len(rows.key))
    order = np.argsort(-counts, kind="stable")
    found: list[tuple[Floats, Floats, NDArray[np.bool_]]] = []
    for k in range(int(counts.max())):
        at = starts[order][counts[order] > k] + k
        found.append((np.where(first[at], 0.0, from_last[at]), rows.y[0, at], jump[at]))
    return _Rounds(rows.key[starts][order], found)


def _evaluate(model: Filter, plan: _Rounds, parameters: Floats) -> tuple[Floats, Floats, Floats]:
    """Return log-likelihood, sum of NIS and number of rows with a NIS (K, C) at parameters (d, K, C)."""
    _, keys, points = parameters.shape
    width = max(1, WIDTH // keys)
    slices = (slice(at, min(at + width, points)) for at in range(0, points, width))
    parts = [_filter_points(model, plan, parameters[:, :, some]) for some in slices]
    likelihood, nis, count = (np.concatenate(one, axis=1) for one in zip(*parts, strict=True))
    return likelihood, nis, count


def _concentrate_scale(likelihood: Floats, nis: Floats, count: Floats) -> tuple[Floats, Floats]:
    """Return the log-likelihood at the best common scale, and this scale (K, C)."""
    count = np.maximum(count, 1.0)
    scale = np.maximum(nis / count, 1e-300)
    return likelihood + 0.5 * (nis - count * np.log(scale) - count), scale


def _filter_points(model: Filter, plan: _Rounds, parameters: Floats) -> tuple[Floats, Floats, Floats]:
    d, keys, points = parameters.shape
    own = parameters[:, plan.keys].reshape(d, -1)
    state = model.with_parameters(model.initial(own.shape[1]), own)
    likelihood, nis, count = np.zeros((3, own.shape[1]))
    for number, (dt, y, jump) in enumerate(plan.rounds):
        width = len(dt) * points
        first = np.full(width, number == 0)
        rows = Rows(np.repeat(dt, points), first, np.repeat(y, points)[None], np.empty((0, width)))
        state, step = model.step(state[:, :width], rows)
        counts = ~np.repeat(jump, points)
        good = np.isfinite(step.nis) & (step.flag == 0) & counts
        likelihood[:width] += counts * np.where(step.flag == 0, step.log_likelihood, -1e6)
        nis[:width] += np.where(good, step.nis, 0.0)
        count[:width] += good
    back = np.argsort(plan.keys)
    whole = (one.reshape(len(plan.keys), points)[back] for one in (likelihood, nis, count))
    return next(whole), next(whole), next(whole)


SEASON_WANTED = (
    f"; a season is tried if it stands out in half of the sampled keys, which takes about {CYCLES} of its cycles: look "
    "at more keys (without --quick, or with a larger --keys), or give longer files"
)

FINER, FINAL = 2, 5
"""The numbers of grid refinements: to rank structures, and to fit the chosen structure."""


LEAST = 1e-7
"""The smallest start value in the spec for a learned number, relative to the noise; a search cannot begin at zero."""


class StructureChoice(NamedTuple):
    """The choice of structures for all measurements.

    ranking: the ranking over all measurements.
    chosen: the structure of each measurement.
    robust: options of robust updates, or None.
    failed: the name of each structure that could not be fitted, with the reason.
    is_wanted: whether the user has named the structure.
    """

    ranking: Ranking
    chosen: list[CandidateStructure]
    robust: dict[str, Any] | None
    failed: dict[str, str]
    is_wanted: bool = False

    @property
    def names(self) -> list[str]:
        """Return for each measurement the name of the chosen structure in the ranking."""
        return [one.name + (ROBUST if self.robust else "") for one in self.chosen]


def search(
    series: SampledSeries,
    tried: list[CandidateStructure],
    unit: float,
    step: float,
    wanted: str | None = None,
) -> StructureChoice:
    """Fit each structure to the first rows of each series, and rank all structures by the held-out rows.

    Args:
        series: the sample.
        tried: structures to try, the simplest first.
        unit: microseconds per unit of time.
        step: usual step, in the unit of time.
        wanted: name of the structure to choose regardless of the ranking; None means to choose by the ranking.

    Raises:
        UserError: no structure can be fitted, or no structure has the wanted name.
    """
    sample = series.single(unit)
    several = len(series.rows.y) > 1
    weights = HUBER if several else STUDENT_T
    scores, failed = _compute_scores(sample, tried, weights, step)
    if tried[0].name not in scores:
        raise UserError(f"no structure can be fitted: {failed.get(tried[0].name)}")
    # Simple structures first: each before its robust variant, and both before a structure with more states.
    names = list(scores)
    if wanted is not None and wanted not in names:
        way = SEASON_WANTED if "season" in wanted.split() else ""
        raise UserError(f"--structure {wanted}: is not among those that were tried: {', '.join(names)}{way}")
    key = sample.rows.key[sample.held]
    try:
        ranking = rank(names, key, list(scores.values()))
        of_measurement = _rank_by_measurement(series, names, key, scores)
    except ValueError as error:
        raise UserError(f"the structures cannot be compared: {error}") from error
    name = wanted or choose(ranking, names).name
    is_robust = name.endswith(ROBUST)
    same_kind = [one for one in names if one.endswith(ROBUST) == is_robust]
    structures = {one.name: one for one in tried}
    chosen = [
        structures[(wanted or _choose_among(one, same_kind)).removesuffix(ROBUST)]
        if several
        else structures[name.removesuffix(ROBUST)]
        for one in of_measurement
    ]
    return StructureChoice(ranking, chosen, weights if is_robust else None, failed, wanted is not None)


def _compute_scores(
    sample: SplitRows, tried: list[CandidateStructure], weights: dict[str, Any], step: float
) -> tuple[dict[str, Floats], dict[str, str]]:
    """Return the held-out rows' scores under each structure, plain and robust, and why other structures failed."""
    measured = int(np.isfinite(sample.rows.y[0, sample.held]).sum())
    learned = sample.take(~sample.held)
    scores: dict[str, Floats] = {}
    failed: dict[str, str] = {}
    for structure in tried:
        composed = compose(["y"], [structure])
        try:
            found = fit_grid(structure, learned, step, FINER)
            for suffix, robust in (("", None), (ROBUST, weights)):
                if robust is not None:
                    found = fit_robust(structure, learned, found, robust, FINER)
                model = build_definition(composed, ["y"], robust)
                values = score_held_out(model, Fitted(found.parameters, {}), sample)
                predicted = int(np.isfinite(values).sum())
                if predicted < 0.9 * measured:
                    failed[structure.name + suffix] = (
                        f"it predicts {predicted:,} of {measured:,} held-out rows, and fails on the others by rounding"
                    )
                else:
                    scores[structure.name + suffix] = values
        except (kalman.ModelError, np.linalg.LinAlgError, FloatingPointError) as error:
            failed[structure.name] = str(error)
    return scores, failed


def _rank_by_measurement(
    series: SampledSeries, names: list[str], key: Any, scores: dict[str, Floats]
) -> list[Ranking]:
    rows = [key // len(series.keys) == m for m in range(len(series.rows.y))]
    return [rank(names, key[mine], [one[mine] for one in scores.values()]) for mine in rows]


def _choose_among(ranking: Ranking, names: list[str]) -> str:
    """Return the name of the model that `choose` selects among the named models of a ranking."""
    kept = [one for one in ranking.scores if one.name in names]
    return choose(ranking._replace(scores=kept), names).name


class Final(NamedTuple):
    """The chosen model, fitted to all sampled rows.

    composed: the model's fields in the files' units, with the medians of the keys' parameters.
    definition: the definition of the model.
    parameters: (d, K) the parameters of the sampled keys.
    usual: (d,) the medians of these parameters.
    still: number of keys for which a variance is zero.
    ratio: the largest ratio, over measurements, of the largest to the smallest noise variance of keys.
    """

    composed: Composed
    definition: dict[str, Any]
    parameters: Floats
    usual: Floats
    still: int
    ratio: float


def finish(
    series: SampledSeries, measurements: list[str], choice: StructureChoice, unit: float, step: float
) -> Final:
    """Fit the choice to all sampled rows of each key, and convert its parameters to the files' units."""
    composed = compose(measurements, choice.chosen)
    sample = series.single(unit)
    count, m = len(series.keys), len(measurements)
    process: list[Floats] = []
    noise = np.zeros((m * (m + 1) // 2, count))
    still = np.zeros(count, bool)
    for i, structure in enumerate(choice.chosen):
        mine = sample.take(sample.rows.key // count == i)
        mine = mine._replace(rows=mine.rows._replace(key=mine.rows.key - i * count), keys=count)
        found = fit_grid(structure, mine, step, FINAL)
        if choice.robust is not None:
            found = fit_robust(structure, mine, found, choice.robust, FINAL)
        process.append(found.parameters[:-1])
        noise[i * (i + 1) // 2 + i] = found.parameters[-1] * series.size[i] ** 2
        still |= found.at_zero
    grow = np.array([series.size[i] ** power for i, power in composed.powers])
    parameters = np.concatenate([np.concatenate(process) * grow, noise])
    return _describe_parameters(composed, measurements, choice.robust, parameters, int(still.sum()))


def rescale(final: Final, choice: StructureChoice, measurements: list[str], scale: Floats) -> Final:
    """Multiply the sampled keys' variances (measured units) by `scale` (m, K), such as the mean NIS of all rows.

    If the updates are not robust, this maximises the likelihood of all rows over the size of the noise.
    """
    m, noise = len(measurements), list[Floats]()
    for i in range(m):
        noise += [np.sqrt(scale[i] * scale[j]) for j in range(i + 1)]
    factors = [scale[i] ** (power / 2) for i, power in final.composed.powers] + noise
    return _describe_parameters(
        final.composed, measurements, choice.robust, final.parameters * np.array(factors), final.still
    )


def _describe_parameters(
    composed: Composed, measurements: list[str], robust: dict[str, Any] | None, parameters: Floats, still: int
) -> Final:
    """Return the model with the medians of the keys' parameters (d, K)."""
    usual, m = np.median(parameters, axis=1), len(measurements)
    noise = m * (m + 1) // 2
    own = [i * (i + 1) // 2 + i - noise for i in range(m)]
    ratios = [float(row.max() / row.min()) for row in parameters[own] if row.min() > 0]
    noise_of = np.array([usual[own[i]] for i, _ in composed.powers])
    least = np.array([LEAST * one for one in noise_of] + [0.0] * noise)
    described = _replace_values(composed, np.maximum(usual, least))
    model = build_definition(described, measurements, robust)
    return Final(described, model, parameters, usual, still, max(ratios, default=1.0))


def _replace_values(composed: Composed, values: Floats) -> Composed:
    """Return the model with `values` (d,) in place of the search's start values."""
    written = [float(f"{value:.4g}") for value in values]
    process = copy.deepcopy(composed.process)
    for name, value in zip(composed.learned, written, strict=False):  # R comes last and has several numbers
        if name == "R":
            break
        part, _, field = name.rpartition(".")
        target = next((one for one in process.get("parts", []) if one["name"] == part), process)
        target[field] = value
    packed = written[len(composed.learned) - 1 :]
    R = [list(row) for row in unpack_symmetric(packed)]
    return composed._replace(process=process, R=R)
