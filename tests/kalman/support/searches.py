"""Searches of many series from many starts at once, each as the pooled search of that series alone."""

import numpy as np

from kalman.learning.bounds import search_outcome, search_within
from kalman.learning.groups import GroupLearning, _search_together
from kalman.learning.key_fits import FitOutcome
from kalman.learning.scoring import Maximum, build_point
from tests.kalman.support.key_series import rows_of
from tests.kalman.support.oracles import UNIT


def searched(learn, series, starts) -> list[list[Maximum]]:
    """Return the ends of the searches of each series from each of starts (p, S)."""
    own, count = GroupLearning(learn), starts.shape[1]
    rows = rows_of(series)
    of_series = [np.flatnonzero(rows.key == k) for k in range(len(series))]

    def points(theta, which):
        places = [of_series[k] for k in which // count]
        key = np.repeat(np.arange(len(which)), [len(one) for one in places])
        some = rows.take(np.concatenate(places))._replace(key=key)
        value, vector, used = own.evaluate(theta, np.arange(len(which)), some, len(which), UNIT)
        found = zip(theta.T, value.tolist(), vector.T, used.tolist(), strict=True)
        return [build_point(*one) for one in found]

    all_starts = np.tile(starts, (1, len(series)))
    begin = points(all_starts, np.arange(all_starts.shape[1]))
    found = _search_together(
        {j: search_within(point, learn.variables, 100) for j, point in enumerate(begin)}, points
    )
    return [[found[k * count + s] for s in range(count)] for k in range(len(series))]


def judged(learn, ends, best):
    """Return how far each end that says that it arrived is below the best (K,), and the share of those that do not."""
    lost: list[float] = []
    for most, one in zip(best, ends, strict=True):
        arrived = [end for end in one if search_outcome(end, learn.variables)[0] != FitOutcome.FAILED]
        lost += [most - end.point.value for end in arrived]
    return np.array(lost), 1.0 - len(lost) / sum(len(one) for one in ends)
