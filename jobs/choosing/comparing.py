"""Compare models of the same measurements: fit each on the first rows of every key, score it on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import kalman
from jobs.choosing.held_out import FEWEST, SplitRows, fit, mark_held_out, score_held_out
from jobs.choosing.ranking import Ranking, rank
from jobs.choosing.series import sample_rows
from jobs.core.errors import UserError
from jobs.landing.parsing import ParsedRows, parse
from jobs.landing.raw_rows import RawRows
from jobs.offline.filtering import order_accepted_rows
from jobs.specs.model_spec import ModelSpec


class ModelComparison(NamedTuple):
    """Ranking of models (the first given is the reference); keys: number of keys that were available."""

    ranking: Ranking
    keys: int
    rejected: int


def check_comparable(specs: Sequence[ModelSpec]) -> None:
    """Check that models have the same rows and predict the same numbers.

    Raises:
        UserError: the models differ in this.
    """
    first = specs[0]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--model {name} is given twice")
    for spec in specs[1:]:
        for field in ("measurement", "key", "time"):
            if getattr(spec, field) != getattr(first, field):
                raise UserError(
                    f"{spec.name} and {first.name} differ in `{field}`: {getattr(spec, field)} and "
                    f"{getattr(first, field)}; likelihoods of different rows cannot be compared"
                )
    for spec in specs:
        if spec.inputs is not None:
            raise UserError(
                f"{spec.name} has inputs from a table, which compare does not read; land them as control columns"
            )


def list_columns(specs: Sequence[ModelSpec]) -> list[str]:
    """Return all columns that the models read."""
    return list(dict.fromkeys(name for spec in specs for name in spec.columns))


def compare(
    specs: Sequence[ModelSpec], source: RawRows, what: str, most_keys: int, most_rows: int
) -> ModelComparison:
    """Rank models by the log-likelihood of held-out rows.

    Args:
        specs: specs of the models; a row that one of them rejects is left out for all.
        source: the rows.
        what: name of the rows' source, for errors.
        most_keys: number of keys to sample.
        most_rows: number of last rows to take of each key.

    Raises:
        UserError: there are too few rows, or a model cannot be fitted.
    """
    parsed = [parse(spec, source, what) for spec in specs]
    common = parsed[0]
    for other in parsed[1:]:
        common = common._replace(reason=np.where(common.accepted, other.reason, common.reason))
    order, rows = order_accepted_rows(common, specs[0].duplicates)
    found = sample_rows(rows, parsed[0].keys, most_keys, most_rows)
    if found is None:
        raise UserError(f"{what}: no key has {FEWEST} rows with each measurement")
    places, count = order[found.places], len(found.keys)
    seen = np.asarray(np.isfinite(rows.y[:, found.places]).any(axis=0))
    held = mark_held_out(found.number, count, seen)
    scores = []
    for spec, one in zip(specs, parsed, strict=True):
        taken = _sort_rows(one, found.number, places)
        sample = SplitRows(taken, count, held, spec.unit_us)
        try:
            definition = spec.definition()
            scores.append(score_held_out(definition, fit(definition, sample), sample))
        except kalman.ModelError as error:
            raise UserError(f"{spec.name}: {error}") from error
    names = [spec.name for spec in specs]
    try:
        ranking = rank(names, found.number[held], scores)
    except ValueError as error:
        raise UserError(f"{', '.join(names)}: {error}") from error
    return ModelComparison(ranking, parsed[0].keys, int((~common.accepted).sum()))


def _sort_rows(rows: ParsedRows, key: np.ndarray, places: np.ndarray) -> kalman.SortedRows:
    return kalman.SortedRows(key, rows.time[places], rows.y[:, places], rows.u[:, places])
