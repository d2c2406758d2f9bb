"""Smoothing in pieces and with checkpoints: the bits of the recursion that keeps every state, in bounded memory."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import kalman
from kalman import flags
from kalman.evaluation.diagnostics import Watch, innovations
from kalman.filters.own_parameters import with_key_parameters
from kalman.run import build_rounds, find_late_rows
from kalman.smoothers.checkpoints import Footprint, Lengths, split_sections
from kalman.smoothers.kinds import build_smoother, select_smoothed_part
from kalman.smoothers.pieces import Pieces
from kalman.smoothers.smooth import smooth
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT

PROPER = {"mean": [0.0, 0.0], "covariance": [[4.0, 0.0], [0.0, 1.0]]}
PROCESS = {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.1}
MODE = {"process": PROCESS, "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]}}
QUIET = {**MODE, "process": {**PROCESS, "level_variance": 0.01}}
TREND = {**MODE, "initial": PROPER}
MODES = {"modes": [MODE, QUIET], "initial": PROPER}
KINDS: dict[str, dict[str, Any]] = {
    "joseph": TREND,
    "square root": {**TREND, "form": "square_root"},
    "information": {**TREND, "form": "information"},
    "diffuse": {**TREND, "initial": {"diffuse": True}},
    "partly diffuse": {
        **TREND,
        "initial": {**PROPER, "diffuse": [True, False], "covariance": [[0, 0], [0, 1]]},
    },
    "gate": {**TREND, "robust": {"gate": {"probability": 0.8}}},
    "student": {**TREND, "robust": {"student_t": {"degrees": 4.0}}},
    "huber": {**TREND, "robust": {"huber": {"threshold": 1.0}}},
    "adaptive": {**TREND, "adaptive": {"R": 0.02, "Q": 0.01}},
    "32 bits": {**TREND, "storage": {"dtype": "float32"}},
    "fixed lag": {**TREND, "smoothing": {"lag": 3}},
    "sliding": {**TREND, "sliding_log_likelihood": 4},
    "sliding, extended": {**TREND, "filter": "extended", "sliding_log_likelihood": 4},
    "extended": {**TREND, "filter": "extended"},
    "extended with lag": {**TREND, "filter": "extended", "smoothing": {"lag": 3}},
    "unscented": {**TREND, "filter": "unscented"},
    "unscented square root": {**TREND, "filter": "unscented", "form": "square_root"},
    "cubature": {**TREND, "filter": "cubature"},
    "imm": {**MODES, "filter": "imm", "transition": [[0.9, 0.1], [0.2, 0.8]]},
    "imm of unscented": {
        "filter": "imm",
        "transition": [[0.9, 0.1], [0.2, 0.8]],
        "modes": [{**MODE, "filter": "unscented"}, QUIET],
        "initial": PROPER,
    },
    "mmae": {**MODES, "filter": "mmae"},
}


def keeping_everything(model, states, rows):
    """The recursion without checkpoints: the filter's states before every round are kept."""
    history, size = [], select_smoothed_part(model).size
    after, outputs = kalman.run(
        model,
        states,
        rows,
        UNIT,
        lambda taken: history.append(taken._replace(before=taken.before[:size].copy())),
    )
    backwards = build_smoother(model)
    kept = np.flatnonzero(~find_late_rows(states, rows))
    plan = build_rounds(rows.key[kept])
    values = after.values[:size, plan.keys]
    later = backwards.begin(values)
    found = {name: np.full((len(a), len(rows.key)), np.nan) for name, a in backwards.extra(later).items()}
    mean, covariance = np.full(outputs.mean.shape, np.nan), np.full(outputs.covariance.shape, np.nan)
    for place, before, taken, step in reversed(history):
        at, keys = kept[plan.order[place]], slice(0, len(taken.dt))
        mean[:, at], covariance[:, at] = backwards.smoothed(values[:, keys], later[:, keys])
        for name, value in backwards.extra(later[:, keys]).items():
            found[name][:, at] = value
        earlier = backwards.back(before, taken, later[:, keys])
        later[:, keys] = np.where(step.flag == flags.WELL, earlier, later[:, keys])
        values[:, keys] = before
    return after, outputs, (mean, covariance, found)


def definition_of(kind):
    return {"states": ["level", "slope"], "measurement": ["y"], **KINDS[kind]}


def uneven_rows(rng, keys=9, longest=40):
    """Rows of keys of 1 up to many rows, some without any, with outliers, gaps, and missing measurements."""
    count = rng.integers(0, longest, keys)
    count[[2, 5]] = 1, 3 * longest
    n = int(count.sum())
    y = rng.normal(size=(1, n)) * np.where(rng.random(n) < 0.05, 300.0, 3.0)
    y[0, rng.random(n) < 0.2] = np.nan
    y[0, rng.random(n) < 0.02] = 1e200  # an overflow, which is flagged
    time = np.cumsum(rng.integers(1, 4, n)) * int(UNIT)
    return kalman.SortedRows(np.repeat(np.arange(keys), count), time, y, np.empty((0, n)))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "imm of unscented" else []) for kind in KINDS],
)
def test_every_room_gives_the_bits_of_the_recursion_that_keeps_everything(kind):
    model = kalman.build(definition_of(kind))
    rows = uneven_rows(np.random.default_rng(3))
    start = kalman.initial_states(model, 9)
    expected = keeping_everything(model, start, rows)
    for room in (1, 20_000, 1e9):
        states, outputs, smoothed = smooth(model, start, rows, UNIT, room=room)
        same(list(states), list(expected[0]))
        same(list(outputs), list(expected[1]))
        same([*smoothed], [*expected[2]])


@pytest.mark.parametrize("kind", ["diffuse", "gate", "imm"])
def test_late_rows_and_innovations_come_in_pieces_too(kind):
    model = kalman.build(definition_of(kind))
    rows = uneven_rows(np.random.default_rng(4))
    early = np.arange(len(rows.key)) % 3 == 0
    states, _ = kalman.run(model, kalman.initial_states(model, 9), rows.take(early), UNIT)
    states.event_time[4] -= 10**9  # a key none of whose rows is late
    expected = keeping_everything(model, states, rows)
    _, _, white = innovations(model, states, rows, UNIT)
    assert expected[1].late.any() and not expected[1].late.all()
    for room in (1, 20_000, 1e9):
        pieces = Pieces(model, states, rows, UNIT, Watch, room)
        seen = np.zeros(len(rows.key), int)
        for piece in pieces:
            seen[piece.rows] += 1
            n = len(expected[1]) - 1
            same([*piece.outputs[:n]], [np.asarray(array)[..., piece.rows] for array in expected[1][:n]])
            same(piece.smoothed.mean, expected[2][0][:, piece.rows])
            same(piece.smoothed.covariance, expected[2][1][:, piece.rows])
            same(piece.found["innovation"], white[:, piece.rows])
        assert (seen == 1).all()
        same(list(pieces.states), list(expected[0]))


def test_a_control():
    rng = np.random.default_rng(6)
    definition = random_definition(rng, "explicit", 3, 2, 2)
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 30, 20)
    expected = keeping_everything(model, kalman.initial_states(model, 30), rows)
    _, _, smoothed = smooth(model, kalman.initial_states(model, 30), rows, UNIT, room=1)
    same([*smoothed], [*expected[2]])


def test_each_keys_own_parameters():
    learn = {"parameters": ["R"], "scope": "key"}
    model = kalman.build({**definition_of("joseph"), "learn": learn})
    rows = uneven_rows(np.random.default_rng(7))
    start = kalman.initial_states(model, 9)
    own = with_key_parameters(model, start.values, {"R": np.linspace(0.5, 4.0, 9)[None]})
    start = start._replace(values=own)
    expected = keeping_everything(model, start, rows)
    _, _, smoothed = smooth(model, start, rows, UNIT, room=1)
    same([*smoothed], [*expected[2]])


def test_no_rows():
    model = kalman.build(definition_of("imm"))
    none = kalman.SortedRows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((1, 0)), np.zeros((0, 0)))
    states, outputs, smoothed = smooth(model, kalman.initial_states(model, 3), none, UNIT)
    assert smoothed.mean.shape == outputs.mean.shape == (2, 0) and states.values.shape == (model.size, 3)
    assert smoothed.extra["mode_probabilities"].shape == (2, 0)


def test_memory_stays_within_the_room_however_long_the_history():
    model = kalman.build(definition_of("joseph"))
    keys, small = 100, 1_000_000

    def peak(longest: int, room: float) -> int:
        n = keys * longest
        time = np.tile(np.arange(longest) * int(UNIT), keys)
        y = np.random.default_rng(1).normal(size=(1, n))
        rows = kalman.SortedRows(np.repeat(np.arange(keys), longest), time, y, np.empty((0, n)))
        start, seen = kalman.initial_states(model, keys), 0
        tracemalloc.start()
        for piece in Pieces(model, start, rows, UNIT, room=room):
            seen += len(piece.rows)
            assert len(piece.rows) * model.size * 8 < room
            del piece
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seen == n
        return taken

    assert peak(300, 1e9) > 30_000 * 8 * model.size > small  # the states of all rows
    for longest in (300, 900):
        assert peak(longest, small) < small + 2 * keys * longest  # a mark for each row, besides


@pytest.mark.parametrize("seed", range(20))
def test_sections_cover_every_row_once_and_fit(seed):
    rng = np.random.default_rng(seed)
    counts = np.ceil(rng.pareto(0.7, rng.integers(1, 300)) + 1).clip(max=20_000).astype(np.int64)
    footprint = Footprint(row=300, round=300, state=80, key=400)
    room = 10 ** rng.uniform(4.5, 7)
    found = split_sections(counts, footprint, room)
    assert [one.first for one in found] + [len(counts)] == [0] + [one.stop for one in found]
    for one in found:
        here = counts[one.first : one.stop]
        assert one.bounds[0] == 0 and one.bounds[-1] == here.max() and (np.diff(one.bounds) > 0).all()
        rows = [
            int((np.minimum(here, b) - np.minimum(here, a)).sum())
            for a, b in zip(one.bounds[:-1], one.bounds[1:], strict=True)
        ]
        kept = sum(int((here > a).sum()) for a in one.bounds[:-1])
        longest = max(
            300 * r + 300 * (b - a) for r, a, b in zip(rows, one.bounds, one.bounds[1:], strict=False)
        )
        used = longest + 80 * kept + 400 * len(here)
        assert used <= room or (len(here) == 1 and used < 600 * 2.5 * np.sqrt(here[0]) + 400)


def test_the_longest_key_alone_takes_as_much_as_its_square_root():
    footprint = Footprint(row=300, round=300, state=80, key=400)
    lengths = Lengths(np.array([5_000_000]))
    (one,) = split_sections(np.array([5_000_000]), footprint, 1.0)
    assert lengths.bytes(np.array(one.bounds), footprint) < 2_000_000


def test_rounds_are_counted_as_they_are_run():
    counts = np.array([3, 1, 7, 7, 2])
    lengths = Lengths(counts)
    plan = build_rounds(np.repeat(np.arange(5), counts))
    same(lengths.count_rows_before(np.arange(8)), np.array(plan.starts))
    same(lengths.active(np.arange(7)), np.diff(plan.starts))
    expected = np.repeat(np.arange(7), np.diff(plan.starts))
    same(lengths.round_of(np.arange(20)), expected)
