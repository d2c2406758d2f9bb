"""Try the structures on the sample, rank them, and fit the chosen ones."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.grid import fit_grid, fit_robust
from jobs.choosing.held_out import Fitted, SplitRows, score_held_out
from jobs.choosing.ranking import Ranking, choose, rank
from jobs.choosing.series import SampledSeries
from jobs.choosing.structures import (
    HUBER,
    ROBUST,
    STUDENT_T,
    CandidateStructure,
    Composed,
    build_definition,
    compose,
)
from jobs.core.errors import UserError
from kalman.linalg.packing import unpack_symmetric

Floats = NDArray[np.float64]

FINER, FINAL = 2, 5
"""Number of grid refinements: to rank structures, and to fit the chosen structure."""


LEAST = 1e-7
"""Smallest start value in the spec for a learned number, relative to the noise: a search cannot begin at zero."""


class StructureChoice(NamedTuple):
    """Choice of structures for all measurements.

    ranking  ranking over all measurements; of_measurement: ranking for each measurement
    chosen   structure of each measurement
    robust   options of robust updates, or None
    failed   name of each structure that could not be fitted, and why
    is_wanted  the user has named the structure
    """

    ranking: Ranking
    of_measurement: list[Ranking]
    chosen: list[CandidateStructure]
    robust: dict[str, Any] | None
    failed: dict[str, str]
    is_wanted: bool = False

    @property
    def names(self) -> list[str]:
        """Return the name of each measurement's choice in its ranking."""
        return [one.name + (ROBUST if self.robust else "") for one in self.chosen]


def search(
    series: SampledSeries,
    tried: list[CandidateStructure],
    unit: float,
    step: float,
    wanted: str | None = None,
) -> StructureChoice:
    """Fit each structure on the first rows of each series, and rank all by the held-out rows.

    Args:
        series: the sample.
        tried: structures to try, the simplest first.
        unit: microseconds per unit of time.
        step: usual step, in the unit of time.
        wanted: name of the structure to choose regardless of the ranking; None: choose by the ranking.

    Raises:
        UserError: no structure can be fitted, or none has the wanted name.
    """
    sample = series.single(unit)
    several = len(series.rows.y) > 1
    weights = HUBER if several else STUDENT_T
    scores, failed = _compute_scores(sample, tried, weights, unit, step)
    if tried[0].name not in scores:
        raise UserError(f"no structure can be fitted: {failed.get(tried[0].name)}")
    # Simple structures first: each before its robust variant, and both before a structure with more states.
    names = list(scores)
    if wanted is not None and wanted not in names:
        raise UserError(f"--structure {wanted}: is not among those that were tried: {', '.join(names)}")
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
    return StructureChoice(
        ranking, of_measurement, chosen, weights if is_robust else None, failed, wanted is not None
    )


def _compute_scores(
    sample: SplitRows, tried: list[CandidateStructure], weights: dict[str, Any], unit: float, step: float
) -> tuple[dict[str, Floats], dict[str, str]]:
    """Return the scores of the held-out rows under each structure, plain and robust, and why others failed."""
    measured = int(np.isfinite(sample.rows.y[0, sample.held]).sum())
    scores: dict[str, Floats] = {}
    failed: dict[str, str] = {}
    for structure in tried:
        composed = compose(["y"], [structure])
        try:
            found = fit_grid(structure, sample.first, sample.keys, unit, step, FINER)
            for suffix, robust in (("", None), (ROBUST, weights)):
                if robust is not None:
                    found = fit_robust(structure, sample.first, sample.keys, unit, found, robust, FINER)
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
    count = len(series.keys)
    found: list[Ranking] = []
    for m in range(len(series.rows.y)):
        mine = key // count == m
        found.append(rank(names, key[mine], [one[mine] for one in scores.values()]))
    return found


def _choose_among(ranking: Ranking, names: list[str]) -> str:
    """Return the choice among the named models of a ranking."""
    kept = [one for one in ranking.scores if one.name in names]
    return choose(ranking._replace(scores=kept), names).name


class Final(NamedTuple):
    """Chosen model, fitted on all sampled rows.

    composed   the model's fields in the files' units, with the medians of the keys' parameters
    definition definition of the model
    parameters (d, K) parameters of the sampled keys; usual (d,) their medians
    still      keys for which a variance is zero
    ratio      ratio of the largest to the smallest variance over the keys
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
    """Fit the choice on all sampled rows of each key, and convert its parameters to the files' units."""
    composed = compose(measurements, choice.chosen)
    sample = series.single(unit)
    count, m = len(series.keys), len(measurements)
    process: list[Floats] = []
    noise = np.zeros((m * (m + 1) // 2, count))
    still = np.zeros(count, bool)
    for i, structure in enumerate(choice.chosen):
        mine = sample.rows.take(sample.rows.key // count == i)
        mine = mine._replace(key=mine.key - i * count)
        found = fit_grid(structure, mine, count, unit, step, FINAL)
        if choice.robust is not None:
            found = fit_robust(structure, mine, count, unit, found, choice.robust, FINAL)
        process.append(found.parameters[:-1])
        noise[i * (i + 1) // 2 + i] = found.parameters[-1] * series.size[i] ** 2
        still |= found.at_zero
    grow = np.array([series.size[i] ** power for i, power in composed.powers])
    parameters = np.concatenate([np.concatenate(process) * grow, noise])
    usual = np.median(parameters, axis=1)
    own = [i * (i + 1) // 2 + i - len(noise) for i in range(m)]
    ratios = [float(row.max() / row.min()) for row in parameters[own] if row.min() > 0]
    noise_of = np.array([usual[own[i]] for i, _ in composed.powers])
    least = np.array([LEAST * noise for noise in noise_of] + [0.0] * len(noise))
    described = _replace_values(composed, np.maximum(usual, least))
    model = build_definition(described, measurements, choice.robust)
    return Final(described, model, parameters, usual, int(still.sum()), max(ratios, default=1.0))


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
