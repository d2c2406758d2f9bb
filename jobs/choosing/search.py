"""Try the structures on the sample, rank them, and fit the chosen ones."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.held_out import fit, held_out_scores
from jobs.choosing.ranking import Ranking, choose, rank
from jobs.choosing.series import Series
from jobs.choosing.structures import (
    HUBER,
    ROBUST,
    STUDENT_T,
    Composed,
    Structure,
    compose,
    definition,
)
from jobs.core.errors import UserError
from kalman.learning.key_fits import Outcome
from kalman.learning.learners import learnable
from kalman.linalg.packing import symmetric

Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """What is chosen for the measurements together.

    ranking  over all measurements; of_measurement: of each
    chosen   the structure of each measurement
    robust   the options of robust updates, None without
    failed   structures that could not be fitted: name, why
    """

    ranking: Ranking
    of_measurement: list[Ranking]
    chosen: list[Structure]
    robust: dict[str, Any] | None
    failed: dict[str, str]

    @property
    def names(self) -> list[str]:
        """The name of each measurement's choice in its ranking."""
        return [one.name + (ROBUST if self.robust else "") for one in self.chosen]


def search(series: Series, tried: list[Structure], unit: float, wanted: str | None = None) -> Choice:
    """Fit each structure on the first rows of each series, and rank all by the rows that are held out.

    Args:
        series: the sample.
        tried: the simplest first.
        unit: microseconds in the unit of time.
        wanted: the name of the structure to choose whatever the ranking; None: choose.

    Raises:
        UserError: no structure can be fitted, or none has the wanted name.
    """
    sample = series.single(unit)
    several = len(series.rows.y) > 1
    weights = HUBER if several else STUDENT_T
    scores: dict[str, Floats] = {}
    failed: dict[str, str] = {}
    for structure in tried:
        composed = compose(["y"], [structure])
        try:
            fitted = fit(definition(composed, ["y"]), sample)
            for suffix, robust in (("", None), (ROBUST, weights)):
                model = definition(composed, ["y"], robust)
                scores[structure.name + suffix] = held_out_scores(model, fitted, sample)
        except (kalman.ModelError, np.linalg.LinAlgError, FloatingPointError) as error:
            failed[structure.name] = str(error)
    if tried[0].name not in scores:
        raise UserError(f"no structure can be fitted: {failed.get(tried[0].name)}")
    # The simple ones first, each before its robust twin, and these before a structure with more states.
    names = list(scores)
    if wanted is not None and wanted not in names:
        raise UserError(f"--structure {wanted}: is not among those that were tried: {', '.join(names)}")
    key = sample.rows.key[sample.held]
    try:
        ranking = rank(names, key, list(scores.values()))
        of_measurement = _by_measurement(series, names, key, scores)
    except ValueError as error:
        raise UserError(f"the structures cannot be compared: {error}") from error
    name = wanted or choose(ranking, names).name
    is_robust = name.endswith(ROBUST)
    same_kind = [one for one in names if one.endswith(ROBUST) == is_robust]
    structures = {one.name: one for one in tried}
    chosen = [
        structures[(wanted or _among(one, same_kind)).removesuffix(ROBUST)]
        if several
        else structures[name.removesuffix(ROBUST)]
        for one in of_measurement
    ]
    return Choice(ranking, of_measurement, chosen, weights if is_robust else None, failed)


def _by_measurement(series: Series, names: list[str], key: Any, scores: dict[str, Floats]) -> list[Ranking]:
    count = len(series.keys)
    found: list[Ranking] = []
    for m in range(len(series.rows.y)):
        mine = key // count == m
        found.append(rank(names, key[mine], [one[mine] for one in scores.values()]))
    return found


def _among(ranking: Ranking, names: list[str]) -> str:
    """Return the choice among some of a ranking's models."""
    kept = [one for one in ranking.scores if one.name in names]
    lead = kept[0].behind
    again = ranking._replace(scores=[one._replace(behind=one.behind - lead) for one in kept])
    return choose(again, names).name


class Final(NamedTuple):
    """The chosen model, fitted on all sampled rows.

    composed   its fields in the files' units, with the medians of the keys' parameters
    definition of the model
    parameters (d, K) of the sampled keys; usual (d,) their medians
    outcomes   how many keys' searches ended how: converged, at bound, ...
    ratio      by how much a parameter differs between keys, the largest over the smallest
    """

    composed: Composed
    definition: dict[str, Any]
    parameters: Floats
    usual: Floats
    outcomes: dict[str, int]
    ratio: float


def finish(series: Series, measurements: list[str], choice: Choice, unit: float) -> Final:
    """Fit the choice on all sampled rows of each key, and bring its parameters to the files' units."""
    composed = compose(measurements, choice.chosen)
    rows = series.standard()
    learner = learnable(definition(composed, measurements))
    found = learner.fit_keys(rows, len(series.keys), unit, None)
    outcomes = {
        Outcome(int(one)).name.lower().replace("_", " "): int((found.outcome == one).sum())
        for one in np.unique(found.outcome)
    }
    grow = [series.size[m] ** power for m, power in composed.powers]
    m = len(measurements)
    grow += [series.size[i] * series.size[j] for i in range(m) for j in range(i + 1)]
    parameters = np.asarray(found.parameters) * np.array(grow)
    usual = np.median(parameters, axis=1)
    spread = [float(np.max(row) / np.min(row)) for row in parameters if (row > 0).all()]
    described = _with_values(composed, usual)
    return Final(
        described,
        definition(described, measurements, choice.robust),
        parameters,
        usual,
        outcomes,
        max(spread, default=1.0),
    )


def _with_values(composed: Composed, values: Floats) -> Composed:
    """Return the model with these numbers (d,) in the place of those that the search began with."""
    written = [float(f"{value:.4g}") for value in values]
    process = copy.deepcopy(composed.process)
    for name, value in zip(composed.learned, written, strict=False):  # R has several numbers, and comes last
        if name == "R":
            break
        part, _, field = name.rpartition(".")
        target = next((one for one in process.get("parts", []) if one["name"] == part), process)
        target[field] = value
    packed = written[len(composed.learned) - 1 :]
    R = [list(row) for row in symmetric(packed)]
    return composed._replace(process=process, R=R)
