"""Categorical mixtures against a published latent class fit, EM written out by counting, and Bernoulli mixtures."""

from typing import Any

import numpy as np
import pytest
from scipy import special

import kalman
from kalman import flags
from kalman.learning.key_fits import Population
from kalman.learning.mixtures import build_mixture_learner
from kalman.mixtures.online import MixtureFilter
from tests.kalman.support import laws
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT, full

# Answers of 216 respondents to four questions on conflicting duties, universalistic (0) or particularistic (1), counted
# by pattern from 0000 to 1111: Stouffer and Toby (1951), as in Goodman (1974), Biometrika 61, table 1
STOUFFER_TOBY = [42, 23, 6, 25, 6, 24, 7, 38, 1, 4, 1, 6, 2, 9, 2, 20]


def drawn(rng, k, categories) -> np.ndarray:
    """Return probabilities (k, sum of categories) of k components."""
    return np.array([np.concatenate([rng.dirichlet([2.0] * c) for c in categories]) for _ in range(k)])


def definition(rng, k, categories, **more) -> dict[str, Any]:
    mixture = {
        "components": k,
        "categories": list(categories),
        "weights": rng.dirichlet([5.0] * k).tolist(),
        "probabilities": drawn(rng, k, categories).tolist(),
        **more,
    }
    names = [f"y{i}" for i in range(len(categories))]
    return {"filter": "categorical_mixture", "measurement": names, "control": [], "mixture": mixture}


def built(given) -> MixtureFilter:
    model = kalman.build(given)
    assert isinstance(model, MixtureFilter)
    return model


def sorted_rows(y, key=None) -> kalman.SortedRows:
    n = y.shape[1]
    key = np.zeros(n, np.int64) if key is None else np.asarray(key, np.int64)
    return kalman.SortedRows(key, np.arange(n), np.asarray(y, float), np.empty((0, n)))


def codes(rng, categories, n, missing=0.2) -> np.ndarray:
    y = np.array([rng.integers(0, c, n) for c in categories], float)
    y[rng.random(y.shape) < missing] = np.nan
    return y


def tables(probabilities, categories) -> list[np.ndarray]:
    """Return a table (k, C) for each measurement."""
    return np.split(np.array(probabilities, float), np.cumsum(categories)[:-1], axis=1)


def expectation(w, parts, y) -> tuple[Any, Any, list[Any]]:
    """Return a row's log-likelihood, responsibilities and expected counts, by summing over what is missing."""
    logs = np.log(w)
    for part, code in zip(parts, y, strict=True):
        if not np.isnan(code):
            logs = logs + np.log(part[:, int(code)])
    total = special.logsumexp(logs)
    r = np.exp(logs - total)
    counts = [
        part if np.isnan(code) else np.eye(part.shape[1])[[int(code)] * len(w)]
        for part, code in zip(parts, y, strict=True)
    ]
    return total, r, [r[:, None] * count for count in counts]


@pytest.mark.parametrize(
    ("k", "categories", "batch"), [(1, (3,), 1), (2, (4,), 1), (3, (2, 5), 4), (2, (3, 2, 3), 3)]
)
def test_every_row_is_the_textbooks(k, categories, batch):
    """Online EM of Cappé and Moulines (2009) in the expected counts themselves, one key at a time."""
    rng = np.random.default_rng([k, *categories])
    given = definition(rng, k, categories, batch=batch, step={"decay": 0.7, "offset": 5.0, "minimum": 0.08})
    y, key = codes(rng, categories, 200), np.sort(rng.integers(0, 6, 200))
    model = built(given)
    states, out = kalman.run(model, kalman.initial_states(model, 6), sorted_rows(y, key), UNIT)
    assert not out.flag.any()
    for one in range(6):
        w = np.array(given["mixture"]["weights"])
        parts = tables(given["mixture"]["probabilities"], categories)
        s = [w.copy(), *(w[:, None] * part for part in parts)]
        waiting, rows = [], 0
        for n in np.flatnonzero(key == one):
            row = y[:, n]
            if np.isnan(row).all():
                assert out.log_likelihood[n] == 0.0 and np.isnan(out.nis[n])
                continue
            total, r, counts = expectation(w, parts, row)
            np.testing.assert_allclose(out.log_likelihood[n], total, rtol=1e-11)
            np.testing.assert_allclose(out.extra["responsibilities"][:, n], r, rtol=1e-10)
            pearson = [
                (1.0 / (w @ part)[int(code)] - 1.0) / (part.shape[1] - 1)
                for part, code in zip(parts, row, strict=True)
                if not np.isnan(code)
            ]
            np.testing.assert_allclose(out.nis[n], sum(pearson), rtol=1e-10)
            waiting.append([r, *counts])
            rows += 1
            if len(waiting) == batch:
                gamma = max((rows // batch + 5.0) ** -0.7, 0.08)
                fresh = [np.mean(a, axis=0) for a in zip(*waiting, strict=True)]
                s = [(1 - gamma) * a + gamma * b for a, b in zip(s, fresh, strict=True)]
                w, parts, waiting = s[0], [a / s[0][:, None] for a in s[1:]], []
            flat = np.hstack(parts)
            mean = w @ flat
            np.testing.assert_allclose(out.mean[:, n], mean, rtol=1e-10)
            P = np.einsum("k,ki,kj->ij", w, flat, flat) - np.outer(mean, mean)
            stops = np.cumsum((0, *categories))
            for low, high in zip(stops[:-1], stops[1:], strict=True):  # of one measurement one category comes
                P[low:high, low:high] = np.diag(mean[low:high]) - np.outer(mean[low:high], mean[low:high])
            np.testing.assert_allclose(full(out.covariance[:, n : n + 1])[0], P, rtol=1e-9, atol=1e-12)
        end = states.values[:, one]
        np.testing.assert_allclose(end[model.places["weights"]], w, rtol=1e-10)
        np.testing.assert_allclose(end[model.places["probabilities"]], np.hstack(parts).ravel(), rtol=1e-10)


def test_two_categories_are_a_bernoulli_mixture():
    rng = np.random.default_rng(1)
    p = rng.uniform(0.1, 0.9, (3, 2))
    given = definition(rng, 3, (2, 2))
    given["mixture"]["probabilities"] = np.stack([1 - p, p], axis=2).reshape(3, 4).tolist()
    other = {
        **given,
        "filter": "bernoulli_mixture",
        "mixture": {**given["mixture"], "probabilities": p.tolist()},
    }
    del other["mixture"]["categories"]
    rows = sorted_rows(codes(rng, (2, 2), 300), np.repeat(np.arange(3), 100))
    results = []
    for one in (given, other):
        model = built(one)
        results.append(kalman.run(model, kalman.initial_states(model, 3), rows, UNIT)[1])
    found, expected = results
    np.testing.assert_allclose(found.log_likelihood, expected.log_likelihood, rtol=1e-11)
    np.testing.assert_allclose(
        found.extra["responsibilities"], expected.extra["responsibilities"], rtol=1e-10
    )
    np.testing.assert_allclose(found.mean[[1, 3]], expected.mean, rtol=1e-11)
    # the codes as numbers: mean and covariance of both
    model, twin = built(given), built(other)
    state = kalman.initial_states(model, 1).values, kalman.initial_states(twin, 1).values
    for a, b in zip(model.measured(state[0], rows.u), twin.measured(state[1], rows.u), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_codes_as_numbers_have_the_moments_of_the_table():
    rng = np.random.default_rng(2)
    given = definition(rng, 3, (3, 4))
    model, (a, b) = built(given), tables(given["mixture"]["probabilities"], (3, 4))
    joint = np.einsum("k,ki,kj->ij", given["mixture"]["weights"], a, b)  # of both codes
    x, z = np.indices(joint.shape)
    mean = [(joint * x).sum(), (joint * z).sum()]
    covariance = [
        [(joint * (c - mean[i]) * (d - mean[j])).sum() for j, d in enumerate((x, z))]
        for i, c in enumerate((x, z))
    ]
    found, packed = model.measured(model.initial(1), np.empty((0, 1)))
    np.testing.assert_allclose(found[:, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(full(packed)[0], covariance, rtol=1e-11)


@pytest.mark.parametrize("batch", [1, 3])
def test_laws(batch):
    rng = np.random.default_rng(batch)
    model = built(definition(rng, 3, (3, 2), batch=batch))
    rows = sorted_rows(codes(rng, (3, 2), 300), np.sort(rng.integers(0, 40, 300)))
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 40, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 40, rng)
    laws.snapshot_restores_every_bit(model, rows, 40)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 40, np.inf, flags.NON_FINITE)
    for bad in (-1.0, 0.5, 3.0):
        laws.a_bad_row_hurts_its_own_key_alone(model, rows, 40, bad, flags.OUT_OF_SUPPORT)


def test_a_category_that_never_comes_keeps_a_little_and_the_rest_sums_to_one():
    given = definition(np.random.default_rng(3), 2, (3,), floor=1e-4, step={"minimum": 0.9})
    model = built(given)
    states, out = kalman.run(model, kalman.initial_states(model, 1), sorted_rows(np.ones((1, 200))), UNIT)
    found = states.values[model.places["probabilities"], 0].reshape(2, 3)
    assert not out.flag.any() and found[:, [0, 2]].min() == pytest.approx(1e-4, rel=1e-3)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-15)


# Batch EM


def learner(k, categories, learn=("weights", "probabilities"), scope="pooled", **more):
    return build_mixture_learner(
        {
            "filter": "categorical_mixture",
            "measurement": [f"y{i}" for i in range(len(categories))],
            "mixture": {"components": k, "categories": list(categories), **more},
            "learn": {"parameters": list(learn), "scope": scope},
        }
    )


def fitted(found, rows, most=5000, tolerance=1e-15):
    keys = int(rows.key.max()) + 1
    return found.fit(
        lambda theta: found.evaluate(theta, rows, keys, UNIT), lambda: rows.y[:, ::2], most, tolerance
    )


def test_the_latent_classes_of_stouffer_and_toby():
    """Goodman (1974), table 2, two classes: likelihood-ratio 2.72 on 6 degrees of freedom, class sizes .72 and .28."""
    patterns = np.array([[n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1] for n in range(16)], float).T
    y = np.repeat(patterns, STOUFFER_TOBY, axis=1)
    y = y[:, np.random.default_rng(0).permutation(216)]
    one = learner(2, (2, 2, 2, 2))
    found = fitted(one, sorted_rows(y))
    values = one.parameters(found.theta)
    saturated = sum(n * np.log(n / 216) for n in STOUFFER_TOBY)
    assert 2 * (saturated - found.log_likelihood) == pytest.approx(2.720, abs=5e-4)
    order = np.argsort(values["weights"])
    np.testing.assert_allclose(np.array(values["weights"])[order], [0.279, 0.721], atol=5e-4)
    universalistic = np.array(values["probabilities"])[order][:, ::2]
    np.testing.assert_allclose(
        universalistic, [[0.993, 0.940, 0.927, 0.769], [0.714, 0.330, 0.354, 0.132]], atol=1e-3
    )


def test_a_step_is_the_textbooks_and_never_loses():
    for seed, (k, categories) in enumerate([(1, (3,)), (2, (4,)), (3, (3, 2)), (2, (2, 3, 5))]):
        rng = np.random.default_rng(seed)
        y, start = codes(rng, categories, 80), definition(rng, k, categories)["mixture"]
        one = learner(k, categories, weights=start["weights"], probabilities=start["probabilities"])
        rows, seen = sorted_rows(y), []

        def evaluate(theta, one=one, rows=rows, seen=seen):
            seen.append((theta, one.evaluate(theta, rows, 1, UNIT)))
            return seen[-1][1]

        one.fit(evaluate, lambda y=y: y, 1)
        w, parts = np.array(start["weights"]), tables(start["probabilities"], categories)
        there = [row for row in y.T if not np.isnan(row).all()]
        said = [expectation(w, parts, row) for row in there]
        assert seen[0][1][0] == pytest.approx(sum(a for a, _, _ in said), rel=1e-11)
        r: Any = sum(b for _, b, _ in said)
        counts: list[Any] = [sum(c[j] for _, _, c in said) for j in range(len(categories))]
        moved = one.parameters(seen[1][0])
        np.testing.assert_allclose(moved["weights"], r / len(there), rtol=1e-11)
        np.testing.assert_allclose(
            moved["probabilities"], np.hstack([c / r[:, None] for c in counts]), rtol=1e-10
        )
        one.fit(evaluate, lambda y=y: y, 60, 0.0)
        values = [a[1][0] for a in seen[2:]]
        assert np.diff(values).min() > -1e-9 * abs(values[-1])


def test_a_start_is_learned_held_out_rows_choose_it_and_buckets_add_up():
    rng = np.random.default_rng(4)
    truth = np.array([[0.8, 0.1, 0.1, 0.9, 0.1], [0.1, 0.1, 0.8, 0.2, 0.8]])
    which = rng.integers(0, 2, 4000)
    y = np.array([[rng.choice(3, p=truth[w, :3]), rng.choice(2, p=truth[w, 3:])] for w in which], float).T
    y = np.vstack([y, [[rng.choice(3, p=truth[w, :3]) for w in which]]])
    key = np.sort(rng.integers(0, 9, 4000))
    one = learner(2, (3, 2, 3), holdout=0.2)
    rows = sorted_rows(y, key)
    parts = [
        kalman.SortedRows(key[here] - low, rows.time[here], rows.y[:, here], rows.u[:, here])
        for low, high in ((0, 2), (2, 9))
        for here in [(key >= low) & (key < high)]
    ]

    def of_buckets(theta):
        found = [one.evaluate(theta, part, int(part.key[-1]) + 1, UNIT) for part in parts]
        return sum(f[0] for f in found), np.sum([f[1] for f in found], axis=0), sum(f[2] for f in found)

    found = one.fit(of_buckets, lambda: y[:, ::2], 2000, 1e-14)
    assert found.converged and found.held_out is not None
    values = one.parameters(found.theta)
    order = np.argsort(np.array(values["probabilities"])[:, 0])[::-1]
    expected = np.hstack([truth, truth[:, :3]])
    np.testing.assert_allclose(np.array(values["probabilities"])[order], expected, atol=0.06)
    whole, vector, used = one.evaluate(found.theta, rows, 9, UNIT)
    assert found.log_likelihood == pytest.approx(whole, rel=1e-12) and used == 4000
    model = kalman.build(one.definition, one.parameters(found.theta))
    same(model.initial(1)[: len(found.theta), 0], found.theta)


def test_each_key_is_drawn_towards_the_pooled_mixture():
    rng = np.random.default_rng(5)
    one = learner(2, (3, 2), scope="key")
    pooled = np.concatenate([[0.4, 0.6], drawn(rng, 2, (3, 2)).ravel()])
    rows = sorted_rows(codes(rng, (3, 2), 80), np.repeat([0, 1], [3, 77]))
    found = one.fit_keys(rows, 3, UNIT, Population(pooled, np.eye(12), 0))
    np.testing.assert_allclose(found.theta[:, 2], pooled, rtol=1e-12)  # no rows
    # the mode of the posterior with 20 more rows as the pooled mixture says, by counting
    for key in (0, 1):
        w, parts = pooled[:2], tables(pooled[2:].reshape(2, 5), (3, 2))
        prior = [20 * w, *(20 * w[:, None] * part for part in parts)]
        own = [row for row, k in zip(rows.y.T, rows.key, strict=True) if k == key and not np.isnan(row).all()]
        for _ in range(50):
            said = [expectation(w, parts, row) for row in own]
            r = prior[0] + sum(b for _, b, _ in said)
            counts = [prior[j + 1] + sum(c[j] for _, _, c in said) for j in range(2)]
            w, parts = r / r.sum(), [c / r[:, None] for c in counts]
        np.testing.assert_allclose(
            found.theta[:, key], np.concatenate([w, np.hstack(parts).ravel()]), rtol=1e-9
        )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"categories": None}, "mixture.categories"),
        ({"categories": 1}, "mixture.categories"),
        ({"categories": [3, 2]}, "mixture.categories"),
        ({"categories": 65}, "mixture.categories"),
        ({"probabilities": [[0.5, 0.5], [0.5, 0.5]]}, "mixture.probabilities[0]"),
        ({"probabilities": [[0.5, 0.3, 0.3], [0.2, 0.3, 0.5]]}, "mixture.probabilities[0]"),
        ({"probabilities": [[0.5, 0.2, 0.3], [0.0, 0.5, 0.5]]}, "mixture.probabilities[1]"),
        ({"floor": 0.4}, "mixture.floor"),
        ({"rates": [1.0, 2.0]}, "mixture.rates"),
    ],
)
def test_mistakes_name_their_field(change, field):
    mixture = {"categories": 3, "probabilities": [[0.5, 0.2, 0.3], [0.2, 0.3, 0.5]], **change}
    with pytest.raises(kalman.ModelError) as refused:
        kalman.build({"filter": "categorical_mixture", "measurement": ["y"], "mixture": mixture})
    assert refused.value.field == field
    for section in ("process", "observation", "initial"):
        given = {"filter": "categorical_mixture", "measurement": ["y"], "mixture": {"categories": 3}}
        with pytest.raises(kalman.ModelError, match="a categorical_mixture has none") as refused:
            kalman.build({**given, section: {}})
        assert refused.value.field == section
    gaussian = {"means": [0.0], "covariances": [1.0], "categories": 3}
    with pytest.raises(kalman.ModelError, match="a gaussian_mixture has none"):
        kalman.build({"filter": "gaussian_mixture", "measurement": ["y"], "mixture": gaussian})
