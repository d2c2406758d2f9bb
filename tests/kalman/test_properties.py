"""What holds for any model and any rows."""

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kalman
from kalman.filters.recursions import predict
from tests.kalman.support.models import SIZES, random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, full, textbook, transition_of

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


@quick
@given(
    seeds,
    st.sampled_from(["explicit", *SIZES]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 6),
    st.booleans(),
)
def test_shapes_symmetry_and_sums(seed, kind, n, m, keys, longest, diffuse):
    rng = np.random.default_rng(seed)
    definition = random_definition(rng, kind, n, m)
    if diffuse:
        definition["initial"] = {"diffuse": True}
    model = kalman.build(definition)
    rows = random_rows(rng, definition, keys, longest, missing=rng.random())
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    n, N = len(model.states), len(rows.key)
    assert states.values.shape == (model.size, keys) and model.size == sum(
        a for (a,) in model.fields.values()
    )
    assert outputs.mean.shape == (n, N) and outputs.covariance.shape == (n * (n + 1) // 2, N)
    assert not outputs.flag.any() and not outputs.late.any()
    assert states.count.tolist() == np.bincount(rows.key, minlength=keys).tolist()
    summed = np.bincount(rows.key, outputs.log_likelihood, minlength=keys)
    np.testing.assert_allclose(states.log_likelihood, summed, rtol=1e-12, atol=1e-12)
    for P in full(outputs.covariance):
        if np.isfinite(P).all():
            assert np.linalg.eigvalsh(P).min() >= -1e-12 * np.abs(P).max()
    empty = np.isnan(rows.y).all(axis=0)
    assert (outputs.log_likelihood[empty] == 0).all() and np.isnan(outputs.nis[empty]).all()


@quick
@given(seeds, st.sampled_from(list(SIZES)), st.floats(0, 50), st.floats(0, 50))
def test_predicting_twice_is_predicting_once(seed, kind, a, b):
    """The semigroup law: F(a+b) = F(b) F(a) and Q(a+b) = F(b) Q(a) F(b)' + Q(b)."""
    rng = np.random.default_rng(seed)
    definition = random_definition(rng, kind)
    model = kalman.build(definition)
    values = {p.name: p.value for p in model.parameters}  # type: ignore[attr-defined]
    start = model.initial(1)
    m, P = (list(part) for part in model.moments(start))

    def moved(m, P, dt):
        return predict(m, P, model.process.transition(np.array([dt]), [], values))  # type: ignore[attr-defined]

    once, twice = moved(m, P, a + b), moved(*moved(m, P, a), b)
    scale = 1e-12 * (1 + np.abs(np.array(once[1])).max())
    np.testing.assert_allclose(np.array(once[0]), np.array(twice[0]), rtol=1e-10, atol=scale)
    np.testing.assert_allclose(np.array(once[1]), np.array(twice[1]), rtol=1e-10, atol=scale)
    F, Q, c = transition_of(definition["process"], a)
    mean, covariance = (np.array(part)[:, 0] for part in moved(m, P, a))
    np.testing.assert_allclose(mean, F @ np.array(m)[:, 0] + c, rtol=1e-10, atol=scale)
    whole = F @ full(model.moments(start)[1])[0] @ F.T + Q
    np.testing.assert_allclose(full(covariance[:, None])[0], whole, rtol=1e-9, atol=scale)
    same(np.array(moved(m, P, 0.0)[0]), np.array(m))
    np.testing.assert_allclose(np.array(moved(m, P, 0.0)[1]), np.array(P), rtol=1e-15)


@quick
@given(seeds, st.integers(-140, 140))
def test_the_unit_of_measurement_does_not_matter(seed, exponent):
    """Everything scaled by a power of ten from tiny to huge: the same estimate in the other unit."""
    rng = np.random.default_rng(seed)
    definition = random_definition(rng, "explicit", 2, 2)
    s = 10.0**exponent
    scaled = {
        **definition,
        "process": {**definition["process"], "Q": (np.array(definition["process"]["Q"]) * s * s).tolist()},
        "observation": {
            **definition["observation"],
            "R": (np.array(definition["observation"]["R"]) * s * s).tolist(),
        },
        "initial": {
            "mean": (np.array(definition["initial"]["mean"]) * s).tolist(),
            "covariance": (np.array(definition["initial"]["covariance"]) * s * s).tolist(),
        },
    }
    rows = random_rows(rng, definition, 5, 8)
    outputs = []
    for model, y in ((kalman.build(definition), rows.y), (kalman.build(scaled), rows.y * s)):
        outputs.append(kalman.run(model, kalman.initial_states(model, 5), rows._replace(y=y), UNIT)[1])
    assert not outputs[1].flag.any()
    np.testing.assert_allclose(outputs[1].mean, outputs[0].mean * s, rtol=1e-9, atol=1e-12 * s)
    np.testing.assert_allclose(outputs[1].nis, outputs[0].nis, rtol=1e-9)


@quick
@given(seeds, st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_any_missing_pattern(seed, pattern):
    """One missing component costs that component alone, with noise correlated between all of them."""
    rng = np.random.default_rng(seed)
    definition = random_definition(rng, "explicit", 3, 3)
    y = np.where(pattern, rng.normal(size=(len(pattern), 3)), np.nan)
    N = len(y)
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.zeros(N, np.int64), np.zeros(N, np.int64), y.T.copy(), np.empty((0, N)))
    _, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    truth = textbook(definition, np.array(definition["observation"]["H"]), y, np.zeros(N), np.empty((N, 0)))
    np.testing.assert_allclose(outputs.mean.T, truth.means, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(outputs.log_likelihood, truth.log_likelihoods, rtol=1e-9, atol=1e-10)
