"""What says that it converged is at a maximum: from far-off starts, of heavy tails, pooled, by group and by key."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from kalman.learning import learners
from kalman.learning.bounds import JUMP, Variables, _follow_flat_way, _raise_hidden, _release_variable
from kalman.learning.em import Fit
from kalman.learning.groups import group_learning
from kalman.learning.key_fits import FitOutcome, compute_expected_gain
from kalman.learning.maximum_likelihood import build_linear_learner
from kalman.learning.scoring import FLAT, Maximum, Point, maximise
from tests.kalman.learning.test_filter_learning import CURVED, curved_rows
from tests.kalman.learning.test_filter_learning import level as extended_level
from tests.kalman.learning.test_group_learning import fit_all
from tests.kalman.support import peers
from tests.kalman.support.key_series import LEVEL, TREND, bursts, made, rows_of
from tests.kalman.support.oracles import UNIT
from tests.kalman.support.searches import judged, searched

LEARNERS = {1: build_linear_learner(LEVEL), 2: build_linear_learner(TREND)}


def pooled(learn, rows, keys):
    return learn.fit(lambda theta: learn.evaluate(theta, rows, keys, UNIT), lambda: rows.y, 100)


def quadratic(gradient, information, low, high):
    """The greatest gain of two numbers within bounds: of all ways to hold some of them at a bound."""
    gains = []
    for sides in product((0, -1, 1), repeat=2):
        side = np.array(sides)
        step = np.where(side < 0, low, np.where(side > 0, high, 0.0))
        if not np.isfinite(step).all():
            continue
        free = side == 0
        slope = (gradient - information @ step)[free]
        step[free] = np.linalg.solve(information[np.ix_(free, free)], slope)
        if (step >= low).all() and (step <= high).all():
            gains.append(gradient @ step - 0.5 * step @ information @ step)
    return max(gains)


def test_the_expected_gain_is_that_of_the_quadratic_within_the_bounds():
    """Inside half of g' J^-1 g; a variance falls by all of it at most; at a bound only the way inwards counts."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        root = rng.normal(size=(2, 2))
        J, g = root @ root.T + 0.1 * np.eye(2), 2.0 * rng.normal(size=2)
        power, held = np.array([rng.choice([0.0, 1.0, 2.0]), 0.0]), np.array([0, rng.choice([-1, 0, 1])])
        low = np.where(held < 0, 0.0, np.where(power > 0.0, -1.0 / np.maximum(power, 1.0), -np.inf))
        high = np.where(held > 0, 0.0, np.inf)
        (found,) = compute_expected_gain(g[:, None], J[:, :, None], held[:, None], power)
        wanted = quadratic(g, J, low, high)
        assert found <= wanted + 1e-6 * (1.0 + wanted)
        if not (held.any() or power.any()):
            assert found == pytest.approx(0.5 * g @ np.linalg.solve(J, g), rel=1e-5)
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_a_number_of_which_nothing_is_known_promises_nothing():
    J = np.array([[4.0, 0.0], [0.0, 0.0]])
    (found,) = compute_expected_gain(
        np.array([[0.2], [0.0]]), J[:, :, None], np.zeros((2, 1), np.int8), np.array([1.0, 1.0])
    )
    assert found == pytest.approx(0.005, rel=1e-5)


def test_an_end_that_promises_more_is_told_as_failed():
    learn = LEARNERS[1]
    point = Point(np.zeros(2), -10.0, np.array([0.3, 0.0]), np.eye(2), 100)
    far = learn.fit_at(Maximum(point, 3, np.zeros(2, np.int8), None), point)
    assert (
        far.outcome == FitOutcome.FAILED
        and far.reason is not None
        and "0.045 of log-likelihood" in far.reason
    )
    near = point._replace(gradient=np.array([0.1, 0.0]))
    assert learn.fit_at(Maximum(near, 3, np.zeros(2, np.int8), None), near).converged


def test_a_fit_to_few_of_the_rows_has_not_converged():
    found = Fit(np.zeros(1), -10.0, 3, FitOutcome.CONVERGED, used=7)
    assert found.of_rows(7).converged and found.of_rows(1095).outcome == FitOutcome.FAILED
    assert found.of_rows(1095).reason == "only 7 of 1,095 rows could be used: the filter flags the others"


def wandering(seed, length=300):
    rng = np.random.default_rng(seed)
    slope = np.cumsum(rng.normal(size=length) * 0.05)
    return np.cumsum(rng.normal(size=length) + slope) + 2.0 * rng.normal(size=length)


def test_a_trend_is_found_from_each_of_18_written_starts():
    """Variances from 1e-6 to 1e6: one that the rows know nothing of does not end the search of the others."""
    y = wandering(1)
    starts = np.log(list(product((1e-6, 1.0, 1e6), (1e-6, 1e-2, 1e3), (1e-6, 1e4)))).T
    starts[2] *= 0.5  # R is a square
    (ends,) = searched(LEARNERS[2], [y], starts)
    best = peers.best(y, 2).log_likelihood
    lost, failed = judged(LEARNERS[2], [ends], [best])
    assert failed == 0.0 and np.abs(lost).max() < 1e-3


@pytest.mark.slow
def test_what_a_person_would_write_of_a_season_is_a_start():
    """A level of 0.01 and a wave of 1e-5 about R of 1: no step was taken from there."""
    rng = np.random.default_rng(5)
    t = np.arange(400)
    y = 0.3 * np.cumsum(rng.normal(size=400)) + 3.0 * np.sin(2 * np.pi * t / 100) + 2.0 * rng.normal(size=400)
    parts = [
        {"name": "level", "kind": "random_walk", "variance": 0.01},
        {"name": "year", "kind": "seasonal_trigonometric", "period": 100, "harmonics": 1, "variance": 1e-5},
    ]
    definition = {**LEVEL, "states": ["l", "a", "b"], "process": {"kind": "sum", "parts": parts}}
    learn = {"parameters": ["level.variance", "year.variance", "R"]}
    found = pooled(learners.learnable({**definition, "learn": learn}), rows_of([y]), 1)
    own = learners.learnable({**definition, "learn": {**learn, "scope": "key"}})
    (best,) = own.fit_keys(rows_of([y]), 1, UNIT, None).log_likelihood
    assert found.outcome <= FitOutcome.AT_BOUND and found.log_likelihood == pytest.approx(best, abs=1e-3)


@cache
def curved_rows_and_their_maximum():
    y = curved_rows(np.random.default_rng(4), np.array([1.0]), 100)
    by_key = extended_level("extended", {"parameters": ["Q", "R"], "scope": "key"}, **CURVED)
    (best,) = learners.learnable(by_key).fit_keys(rows_of(y), 1, UNIT, None).log_likelihood
    return y, best


@pytest.mark.parametrize("written", [(1e-3, 1e3), pytest.param((1e3, 1e-3), marks=pytest.mark.slow)])
def test_an_extended_filter_for_all_keys_finds_what_a_key_finds(written):
    y, best = curved_rows_and_their_maximum()
    changes = {**CURVED, "process": {**CURVED["process"], "Q": [[written[0]]]}}
    changes["observation"] = {**CURVED["observation"], "R": [[written[1]]]}
    definition = extended_level("extended", {"parameters": ["Q", "R"]}, **changes)
    found = pooled(learners.learnable(definition), rows_of(y), 1)
    assert found.converged and found.log_likelihood == pytest.approx(best, abs=1e-3)


def written(states, variances):
    """A definition with these variances: of the process, then R."""
    base, *process = (LEVEL, "variance") if states == 1 else (TREND, "level_variance", "slope_variance")
    values = {name: float(v) for name, v in zip(process, variances, strict=False)}
    noise = {**base["process"], **values}
    return {**base, "process": noise, "observation": {"R": [[float(variances[-1])]]}}


def ten_starts(states, seed=11):
    return 10.0 ** np.random.default_rng(seed).uniform(-6.0, 6.0, (10, states + 1))


def of_series(states, keys, seed, shares=peers.SHARES):
    """Return how far the ends of ten written starts each are below the best of them and of statsmodels."""
    learn, y = LEARNERS[states], made(keys, 300, seed, states)
    starts = np.array([build_linear_learner(written(states, one)).start for one in ten_starts(states)]).T
    ends = searched(learn, list(y), starts)
    own = learn.fit_keys(rows_of(y), keys, UNIT, None)
    best = np.array([peers.best(one, states, shares).log_likelihood for one in y])
    best = np.maximum(best, [max(end.point.value for end in one) for one in ends])
    best = np.maximum(best, own.log_likelihood)
    lost, failed = judged(learn, ends, best)
    by_key = (best - own.log_likelihood)[own.outcome <= FitOutcome.AT_BOUND]
    return lost, failed, by_key, 1.0 - len(by_key) / keys


def assert_at_maxima(lost, failed, by_key, failed_keys):
    """By key no end is worse by 2; the pooled search begins once, and may end at a second maximum at a bound."""
    for each, share in ((lost, failed), (by_key, failed_keys)):
        assert np.mean(each <= 0.1) >= 0.99 and share <= 0.02
    assert by_key.max() < 2.0


@pytest.mark.parametrize(("states", "keys"), [(1, 2), (2, 1)])
def test_each_of_ten_written_starts_reaches_the_maximum(states, keys):
    lost, *others = of_series(states, keys, 21, (0.3,))
    assert lost.max() < 0.1
    assert_at_maxima(lost, *others)


@pytest.mark.slow
@pytest.mark.parametrize("states", [1, 2])
def test_of_a_thousand_made_series_each_start_reaches_the_maximum(states):
    assert_at_maxima(*of_series(states, 500, 7))


@pytest.mark.parametrize(
    ("starts", "states"),
    [(2, 1), *(pytest.param(10, states, marks=pytest.mark.slow) for states in (1, 2))],
)
def test_groups_end_alike_whatever_is_written(states, starts):
    """The posterior of each group, from several written starts."""
    y = made(6, 200, 8, states)
    y /= np.sqrt(np.nanmean(np.diff(y, axis=1) ** 2, axis=1))[:, None]
    rows, group = rows_of(y), np.array([0, 0, 1, 1, 2, 2])
    values, outcomes = [], []
    for one in ten_starts(states)[:starts]:
        learn = build_linear_learner(written(states, one))
        middle = pooled(learn, rows, 6)
        found, _ = fit_all(group_learning(learn), rows, group, middle, 3)
        assert found.of_rows(found.used).outcome == found.outcome
        assert found.of_rows(found.used * [1, 2, 1]).outcome[1] == FitOutcome.FAILED
        away = found.theta - middle.theta[:, None]
        values.append(found.log_likelihood - 0.5 * np.einsum("ig,ij,jg->g", away, found.precision, away))
        outcomes.append([outcome != FitOutcome.FAILED for outcome in found.outcome])
    assert np.all(outcomes) and (np.max(values, axis=0) - np.min(values, axis=0)).max() < 0.1


def test_bursts_a_thousand_times_as_large_are_within_the_bounds():
    """30 series, a core and 1 to 10 % of bursts: bounds from median differences were far below what the bursts ask."""
    y = bursts(30, 400, 4)
    found = LEARNERS[1].fit_keys(rows_of(y), 30, UNIT, None)
    lost = [
        peers.best(one, 1, (0.3, 0.02)).log_likelihood - a
        for one, a in zip(y, found.log_likelihood, strict=True)
    ]
    assert max(lost) < 0.1 and not any("highest" in str(reason) for reason in found.reason)


FLAT_VARIANCE = Point(np.zeros(1), -10.0, np.zeros(1), np.array([[1e-17]]), 100)


def seen_after(tried: Point) -> Point:
    """What remains of a variance hidden by rounding where its raise leads to this point."""
    return maximise(lambda theta: tried._replace(theta=theta), _raise_hidden(FLAT_VARIANCE, np.ones(1)))


def test_a_hidden_variance_is_raised_unless_that_loses():
    """By half the logarithm of how much more is to be seen; rows that fall out are a loss as well."""
    better = FLAT_VARIANCE._replace(information=np.array([[1e-12]]))
    assert seen_after(better).theta[0] == pytest.approx(0.5 * np.log(1e5), rel=1e-14)
    assert seen_after(better._replace(value=-10.0005)).value == -10.0005
    for worse in (
        better._replace(value=-10.002),
        better._replace(used=99),
        better._replace(value=np.nan),
        better._replace(gradient=np.array([np.inf])),
    ):
        assert seen_after(worse) is FLAT_VARIANCE


@pytest.mark.parametrize(
    ("value", "known", "used", "end"),
    [
        (-9.99, FLAT, 100, "better"),
        (-9.99, 0.99 * FLAT, 100, "bound"),
        (-9.9995, FLAT, 100, "bound"),
        (-10.0005, FLAT, 100, "bound"),
        (-10.002, FLAT, 100, "worse"),
        (-9.99, FLAT, 99, "worse"),
        (np.nan, FLAT, 100, "worse"),
    ],
)
def test_a_flat_way_ends_where_more_is_seen_and_gained(value, known, used, end):
    tried = Point(np.ones(1), value, np.zeros(1), np.array([[known]]), used)
    found, why = maximise(lambda theta: tried, _follow_flat_way(FLAT_VARIANCE, 0, -3.0, 100))
    assert why == end and found is (FLAT_VARIANCE if end == "worse" else tried)


@pytest.mark.parametrize(
    ("held", "scale", "gradient", "known", "way"),
    [
        (-1, 1.0, 0.2, 0.5, np.log(1.4)),  # scoring in the variance v: v + v g / J
        (-1, 0.5, 0.2, 0.5, np.log(1.8) / 2.0),  # v = exp(2 theta)
        (-1, 0.0, 0.2, 0.5, JUMP),
        (1, 0.0, -0.2, 0.5, -JUMP),
        (0, 1.0, 0.2, 0.99 * FLAT, np.log1p(0.2 / (0.99 * FLAT))),
        (0, 1.0, 0.2, FLAT, None),  # seen: it is the search's
        (0, 0.0, 0.2, 0.99 * FLAT, None),
        (0, 1.0, -0.2, 0.99 * FLAT, None),  # outwards
        (-1, 1.0, -0.2, 0.5, None),
        (1, 0.0, 0.2, 0.5, None),
        (-1, 1.0, np.sqrt(0.0051), 0.5, np.log1p(2.0 * np.sqrt(0.0051))),
        (-1, 1.0, np.sqrt(0.0049), 0.5, None),  # a gain below that of what has arrived
    ],
)
def test_a_variable_is_released_from_its_bound_where_that_promises_likelihood(
    held, scale, gradient, known, way
):
    """Beside one at its bound that promises nothing; by the whole way, or by 0.8 or 0.6 of it."""
    variables = Variables(
        ("a", "b"), np.full(2, np.inf), np.array([1.0, scale]), 1, (None, None), (None, None)
    )
    point = Point(np.array([2.0, 3.0]), -10.0, np.array([0.0, gradient]), np.diag([1.0, known]), 100)
    found = Maximum(point, 5, np.array([-1, held]), None)
    for enough in range(4):
        asked: list[np.ndarray] = []

        def tried(theta, asked=asked, enough=enough):
            asked.append(theta)
            return point._replace(theta=theta, value=-9.9 if len(asked) > enough else -10.0)

        ended = maximise(tried, _release_variable(found, variables, 100))
        if way is None or enough == 3:
            assert ended is found and len(asked) == (0 if way is None else 3)
            continue
        share = (1.0, 0.8, 0.6)[enough]
        np.testing.assert_allclose(ended.point.theta, [2.0, 3.0 + share * way], rtol=1e-14)
        assert ended.point.value == -9.9 and ended.held.tolist() == [-1, 0]
