"""Long series: compiled code gives the bits of rounds of NumPy calls, in filters and smoothers of all kinds."""

import sys
from typing import Any, cast

import numpy as np
import pytest

import kalman
from kalman import flags, long_series
from kalman.evaluation.diagnostics import innovations
from kalman.filters.state_output import StateOutput
from kalman.linalg.compiled import COMPILED, Walk, load_llvm
from kalman.linalg.program import Program, Recorded, Tape
from kalman.long_series import build_walk
from kalman.run import build_rounds
from kalman.smoothers.kinds import build_smoother, compile_back, select_smoothed_part
from kalman.smoothers.smooth import smooth
from tests.kalman.support.models import SIZES, random_definition, same
from tests.kalman.support.oracles import UNIT

RUN = sys.modules["kalman.run"]
PROPER = {"mean": [0.0, 0.0], "covariance": [[4.0, 0.0], [0.0, 1.0]]}
PROCESS = {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.1}
TREND: dict[str, Any] = {
    "process": PROCESS,
    "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.2], [0.2, 2.0]]},
    "initial": PROPER,
}
NAMES = {"states": ["level", "slope"], "measurement": ["a", "b"]}
KINDS: dict[str, dict[str, Any]] = {
    "joseph": TREND,
    "square root": {**TREND, "form": "square_root"},
    "information": {**TREND, "form": "information"},
    "diffuse": {**TREND, "initial": {"diffuse": True}},
    "gate": {**TREND, "robust": {"gate": {"probability": 0.9}}},
    "student": {**TREND, "robust": {"student_t": {"degrees": 4.0}}},
    "huber": {**TREND, "robust": {"huber": {"threshold": 1.0}}},
    "fading": {**TREND, "robust": {"fading": 1.02}},
    "adaptive": {**TREND, "adaptive": {"R": 0.02, "Q": 0.01}},
    "robust in square roots": {**TREND, "form": "square_root", "robust": {"gate": {"probability": 0.99}}},
    "32 bits": {**TREND, "storage": {"dtype": "float32"}},
    "control": {
        **TREND,
        "control": ["push"],
        "process": {
            "kind": "explicit",
            "F": [[0.9, 0.1], [0.0, 0.8]],
            "Q": [[0.5, 0], [0, 0.1]],
            "B": [[0.5], [1]],
        },
    },
    "matrices by column": {
        **TREND,
        "control": ["push"],
        "observation": {"H": [["push", 0.0], [0.5, 1.0]], "R": [["push", 0.0], [0.0, 2.0]]},
    },
    "lms": {
        "filter": "lms",
        "measurement": ["a"],
        "observation": {"H": [[1.0, 0.5]], "R": [[1.0]]},
        "initial": {"mean": [0.0, 0.0]},
        "lms": {"step": 0.01},
    },
}
RLS = {"filter": "rls", "measurement": ["a"], "observation": {"H": [[1.0, 0.5]]}, "rls": {"forgetting": 0.9}}


def build(definition: dict[str, Any]) -> Any:
    return kalman.build({**NAMES, **definition})


def draw_rows(model: Any, lengths: tuple[int, ...] = (700, 301, 2), seed: int = 0) -> kalman.SortedRows:
    """Return rows with gaps, outliers, and faults: infinite values, equal times, missing components and controls."""
    rng = np.random.default_rng(seed)
    key = np.repeat(np.arange(len(lengths)), lengths)
    n = len(key)
    time = np.concatenate([np.sort(rng.integers(0, int(600 * UNIT), length)) for length in lengths]).astype(
        np.int64
    )
    y = rng.normal(size=(model.measurements, n)).cumsum(axis=1)
    y[:, rng.random(n) < 0.03] *= 30.0
    y[rng.random(y.shape) < 0.1] = np.nan
    y[0, [0, 90, 91, 400]] = np.inf
    u = rng.uniform(0.5, 2.0, size=(model.controls, n))
    u[:, [5, 300]] = np.nan
    return kalman.SortedRows(key, time, y, u)


def in_rounds_and_walked(monkeypatch: pytest.MonkeyPatch, work: Any) -> tuple[Any, Any]:
    """Return the results by rounds of NumPy calls, and with compiled code from the second round on."""
    monkeypatch.setattr(RUN, "MANY_ROUNDS", 10**9)
    rounds = work()
    monkeypatch.setattr(RUN, "MANY_ROUNDS", 50)
    return rounds, work()


def flatten(outputs: Any) -> list[Any]:
    return [*outputs[:-1], dict(outputs.extra)]


def test_llvm_is_there() -> None:
    assert load_llvm() is not None, "the tests of this file would compare rounds with rounds"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [True, False])
def test_compiled_code_changes_no_bit(kind: str, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StateOutput(build(KINDS[kind]))
    rows = draw_rows(model)
    if not missing:
        rows = rows._replace(y=np.nan_to_num(rows.y, nan=0.5, posinf=np.inf))
    assert build_walk(model, missing) is not None
    begin = kalman.initial_states(model, 3)

    def work() -> Any:
        return kalman.run(model, begin, rows, UNIT)

    (states, outputs), (walked, said) = in_rounds_and_walked(monkeypatch, work)
    same([*walked], [*states])
    same(flatten(said), flatten(outputs))
    assert (outputs.flag != flags.WELL).any()
    assert (outputs.flag[3:] == flags.WELL).any(), "some rows were in order"


@pytest.mark.parametrize("kind", [*SIZES, "explicit"])
def test_compiled_code_changes_no_bit_of_a_structure(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    model = kalman.build(random_definition(rng, kind, SIZES.get(kind, 3), 2, 1 if kind == "explicit" else 0))
    rows = draw_rows(model, (300, 120), 1)
    (states, outputs), (walked, said) = in_rounds_and_walked(
        monkeypatch, lambda: kalman.run(model, kalman.initial_states(model, 2), rows, UNIT)
    )
    same([*walked], [*states])
    same(flatten(said), flatten(outputs))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lms", "gate", "32 bits")])
def test_smoothers_go_back_with_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(KINDS[kind])
    rows = draw_rows(model, (400, 150), 2)
    assert compile_back(build_smoother(select_smoothed_part(model)), True) is not None

    def work() -> Any:
        return smooth(model, kalman.initial_states(model, 2), rows, UNIT, room=200_000.0)

    first, second = in_rounds_and_walked(monkeypatch, work)
    same([*second[0]], [*first[0]])
    same(flatten(second[1]), flatten(first[1]))
    same([*second[2][:2]], [*first[2][:2]])


def test_figures_of_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(TREND)
    rows = draw_rows(model)
    first, second = in_rounds_and_walked(
        monkeypatch, lambda: innovations(model, kalman.initial_states(model, 3), rows, UNIT)
    )
    same(second[2], first[2])
    same(flatten(second[1]), flatten(first[1]))


def test_a_state_by_other_functions_is_left_to_rounds() -> None:
    """The factor of recursive least squares takes `hypot`, whose last bit depends on the library."""
    assert build_walk(build(RLS), True) is None


def test_without_llvm_everything_is_done_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(TREND)
    rows = draw_rows(model)
    monkeypatch.setattr(RUN, "build_walk", lambda model, missing: None)
    first, second = in_rounds_and_walked(
        monkeypatch, lambda: kalman.run(model, kalman.initial_states(model, 3), rows, UNIT)
    )
    same([*second[0]], [*first[0]])


def test_where_nothing_can_be_compiled_rounds_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise RuntimeError("no memory may hold code")

    monkeypatch.setattr(long_series, "CutStep", refuse)
    with pytest.warns(UserWarning, match="long series take rounds.*no memory may hold code"):
        assert build_walk(build({**TREND, "initial": {**PROPER, "mean": [1.25, 0.0]}}), True) is None


@pytest.mark.parametrize("smoothed", [False, True])
def test_rows_not_in_order_of_many_keys_share_rounds(smoothed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 keys, a third of whose rows are infinite: not a NumPy step for each such row of each key."""
    model, keys, length = build({**TREND, "form": "information"}), 30, 200
    rows = draw_rows(model, (length,) * keys, 3)
    rows.y[0, np.random.default_rng(0).random(rows.y.shape[1]) < 0.3] = np.inf
    steps = []
    plain = type(model).step
    monkeypatch.setattr(type(model), "step", lambda self, *given: (steps.append(1), plain(self, *given))[1])

    def work() -> Any:
        steps.clear()
        states = kalman.initial_states(model, keys)
        found = smooth(model, states, rows, UNIT) if smoothed else kalman.run(model, states, rows, UNIT)
        return found, len(steps)

    (first, of_rounds), (second, walked) = in_rounds_and_walked(monkeypatch, work)
    same([*second[0]], [*first[0]])
    same(flatten(second[1]), flatten(first[1]))
    if smoothed:
        same([*second[2][:2]], [*first[2][:2]])
    assert walked <= of_rounds * 1.1 + keys * 12


def test_a_short_tail_and_many_keys_stay_in_rounds() -> None:
    assert build_rounds(np.zeros(4095, np.int64)).find_long_tail() is None
    assert build_rounds(np.zeros(4096, np.int64)).find_long_tail() == 0
    wide = np.sort(np.concatenate([np.arange(300), np.zeros(5000, np.int64)]))
    plan = build_rounds(wide)
    assert plan.find_long_tail() == 1
    assert plan.list_places(0, 1).tolist() == list(range(300, 5300))


def test_each_compiled_operation_gives_the_bits_of_numpy() -> None:
    """Over ordinary numbers, zeros of both signs, infinities, NaN and subnormal numbers, in all pairs."""
    values = np.array([0.0, -0.0, 1.0, -1.5, 3e-320, 1e-300, 1e300, np.inf, -np.inf, np.nan, 0.1, 7.0])
    a, b = (grid.ravel() for grid in np.meshgrid(values, values))
    tape = Tape()
    state, x, y = tape.symbol(), tape.symbol(), tape.symbol()
    results: list[Any] = []
    for name in sorted(COMPILED):
        function = getattr(np, name, None)
        if (
            name in ("where", "invert", "logical_not")
            or function is None
            or name.startswith(("bitwise", "logical"))
        ):
            continue
        results.append(function(x, y) if function.nin == 2 else function(x))
    one, other = np.greater(x, y), np.isnan(y)
    results += [one & other, one | other, one ^ other, ~one, np.where(cast(Any, one), x, y)]
    results = [np.where(r, 1.0, 0.0) if r.boolean else r for r in results]
    expected = np.empty((len(results), len(a)))
    program = Program(tape, [state, x, y], results)
    with np.errstate(all="ignore"):
        program([a, a, b], np.empty((program.buffers, len(a))), expected)
    walk = Walk(Recorded(tape.operations, [state, x, y], [state, *results, True]), 1)
    got = np.empty((len(results) + 1, len(a)))
    assert walk(np.zeros(1), [a, b], got) == len(a)
    same(got[1:], expected)
    signs = ~np.isnan(expected) & ~((expected == 0.0) & (expected == got[1:]))
    assert (np.signbit(got[1:]) == np.signbit(expected))[signs].all()
