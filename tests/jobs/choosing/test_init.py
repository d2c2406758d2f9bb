"""`init` and `compare` over files: the spec that is written is accepted, and reads the rows that were found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.signal import lfilter

from jobs import compare, filter, init
from jobs.choosing.columns import Wishes
from jobs.choosing.model_finding import find
from jobs.choosing.ranking import Floats, Ints, ModelScore, Ranking, rank
from jobs.choosing.spec_text import explain_structure
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.core.times import UNIT_US
from jobs.offline.filtering import find_misfits
from jobs.specs.loading import load_spec
from kalman.learning.learners import learnable
from tests.jobs.choosing import real_series

SMALL: Any = {"keys": 6, "rows": 160}


def settings(folder: Path) -> Settings:
    return Settings.load(str(folder / "warehouse"), str(folder / "models"), None)


def files(folder: Path, count: int, n: int, scale: bool = True) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    at = pd.date_range("2024-01-01", periods=n, freq="1h").strftime("%Y-%m-%d %H:%M")
    for k in range(count):
        size = 10.0 ** rng.uniform(-3, 5) if scale else 1.0
        level = np.cumsum(rng.normal(size=n)) * 0.3 + rng.normal(size=n)
        wave = 3 * np.sin(2 * np.pi * np.arange(n) / 24 + 1)
        frame = pd.DataFrame({"at": at, "value": size * (level + wave + 20), "row": range(n)})
        frame.to_csv(folder / f"m-{k}.csv", index=False)
    return folder


def noise(n: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=n).cumsum()


def test_the_spec_is_accepted_and_reads_the_same_rows(tmp_path: Path) -> None:
    folder = files(tmp_path / "loads", 4, 240)
    with (folder / "m-0.csv").open("a") as last:
        last.write("2024-03-01 00:00,broken,9\n")
    done = init.run(settings(tmp_path), str(folder), **SMALL)
    data = done.data
    path = tmp_path / "models" / "loads.yaml"
    assert data["spec"] == str(path) and (tmp_path / "models" / "loads.png").stat().st_size > 10_000
    assert (data["time"], data["key"], data["key_from_name"]) == ("at", ["series"], "series")
    assert (data["measurement"], data["refused"]) == (["value"], {"row": "counts the rows"})
    assert (data["step_microseconds"], data["time_unit"], data["rejected"]) == (3_600_000_000, "hour", 1)
    assert "season" in data["chosen"][0] and data["season_microseconds"] == 86_400_000_000
    assert 0.7 < data["nis_per_component"] < 1.4
    spec = load_spec("loads", tmp_path / "models")
    assert spec.key_from_name == "series" and spec.process is not None
    text = path.read_text()
    assert "# Structures by the log-likelihood of a held-out row" in text and "<- chosen" in text
    out = tmp_path / "out.csv"
    filtered = filter.run(settings(tmp_path), "loads", str(folder), str(out))
    assert (filtered.data["rows"], filtered.data["rejected"], filtered.data["keys"]) == (961, 1, 4)
    with_spec = data["nis_per_component_of_spec"]
    assert with_spec == pytest.approx(filtered.data["nis_per_component"], rel=1e-12) and with_spec > 10
    assert (
        f"  {with_spec:>8.3f}  all 4 keys with the spec's numbers, as filter reports it before pretrain"
        in done.lines
    )
    with pytest.raises(UserError, match="loads.yaml: is there already; give another --output, or replace it"):
        init.run(settings(tmp_path), str(folder), **SMALL)
    assert path.read_text() == text
    again = init.run(settings(tmp_path), str(folder), force=True, structure="level", no_picture=True, **SMALL)
    assert again.data["chosen"] == ["level"] and load_spec("loads", tmp_path / "models").states == ["level"]
    assert sorted(one.name for one in path.parent.iterdir()) == ["loads.png", "loads.yaml"]


def write_cities(path: Path, days: int) -> pd.DataFrame:
    """Write hourly temperatures of two cities with the waves of a day and a year; the days are larger in summer."""
    rng = np.random.default_rng(5)
    hour = np.arange(24 * days)
    at = pd.date_range("2022-01-01", periods=len(hour), freq="h").strftime("%Y-%m-%dT%H:%M:%SZ")
    tables = []
    for city, mean, year, day, loud in (("oslo", 6, 12, 3, 0.25), ("athens", 18, 9, 5, 0.35)):
        weather = lfilter([1.0], [1.0, -0.985], rng.normal(0, loud, len(hour)))
        day_wave = day * (1 - 0.5 * np.cos(2 * np.pi * hour / 8766)) * np.cos(2 * np.pi * (hour - 3) / 24)
        value = mean - year * np.cos(2 * np.pi * (hour - 500) / 8766) - day_wave + weather
        tables.append(pd.DataFrame({"city": city, "time": at, "t": value + rng.normal(0, 0.15, len(hour))}))
    table = pd.concat(tables)
    table.to_csv(path, index=False)
    return table


def write_stocks(path: Path) -> None:
    """Write prices of three stocks on working days, whose changes grow with the price and have heavy tails."""
    rng = np.random.default_rng(5)
    days = pd.bdate_range("2018-01-02", periods=900).strftime("%Y-%m-%d")
    tables = [
        pd.DataFrame({"day": days, "symbol": name, "close": price * np.exp(np.cumsum(move))})
        for name, price, loud in (("AAA", 100, 0.009), ("BBB", 40, 0.015), ("CCC", 300, 0.006))
        for move in [loud * rng.standard_t(4, len(days))]
    ]
    pd.concat(tables).to_csv(path, index=False)


def write_employment(path: Path) -> None:
    """Write the employees of three industries in thousands, a column each, monthly."""
    rng = np.random.default_rng(5)
    n = np.arange(180)
    columns: dict[str, Any] = {"month": pd.date_range("2008-01-01", periods=180, freq="MS").strftime("%Y-%m")}
    for name, level, slope, wave in (("retail_jobs", 15e3, 12, 300), ("mining_jobs", 7e3, 3, 80)):
        noise = np.cumsum(rng.normal(0, 0.0015 * level, 180)) + rng.normal(0, 0.0004 * level, 180)
        columns[name] = level + slope * n + wave * np.sin(2 * np.pi * n / 12) + noise
    pd.DataFrame(columns).to_csv(path, index=False)


def write_quiet_end(path: Path) -> None:
    """Write two random walks whose last third is ten times as quiet as the rest."""
    rng = np.random.default_rng(3)
    size = np.where(np.arange(900) < 600, 1.0, 0.1)
    at = pd.date_range("2024-01-01", periods=900, freq="h")
    walks = [pd.DataFrame({"at": at, "id": k, "y": np.cumsum(size * rng.normal(size=900))}) for k in "ab"]
    pd.concat(walks).to_csv(path, index=False)


def write_elnino(path: Path) -> None:
    real_series.write(real_series.statsmodels_series()["elnino"], path)


@pytest.mark.parametrize(
    "write",
    [
        write_quiet_end,
        pytest.param(write_stocks, marks=pytest.mark.slow),
        pytest.param(lambda path: write_cities(path, 400), id="cities", marks=pytest.mark.slow),
        pytest.param(write_elnino, marks=pytest.mark.slow),
        pytest.param(write_employment, marks=pytest.mark.slow),
    ],
)
def test_what_is_reported_is_what_learning_from_every_row_gets(tmp_path: Path, write: Any) -> None:
    """`pretrain` learns by `fit_keys` from all rows, and warns by the same rule."""
    write(tmp_path / "rows.csv")
    structure = "level" if write is write_quiet_end else None  # a robust one learns for half a minute
    found = find(str(tmp_path / "rows.csv"), Wishes(keys=8, rows=300, structure=structure))
    filtered, rows = found.filtered, found.filtered.rows
    learner = learnable(found.final.definition)
    fit = learner.fit_keys(rows, len(found.series.keys), float(UNIT_US[found.rhythm.unit]), None)
    assert filtered.ratio == pytest.approx(np.mean(fit.nis), rel=0.1)
    far, dependent = find_misfits(np.bincount(rows.key), fit.nis, fit.ljung_box)
    assert filtered.far.tolist() == far.tolist() == [False] * len(far)
    if write is not write_stocks:  # heavy tails lie outside a normal interval
        assert filtered.inside == pytest.approx(0.95, abs=0.03)
        clear = (fit.ljung_box < 1e-6) | (fit.ljung_box > 0.05)
        assert filtered.dependent[clear].tolist() == dependent[clear].tolist()
    assert (filtered.inside > 0.8).all()


def test_a_model_that_does_not_fit_is_said_with_the_next_step(tmp_path: Path) -> None:
    """A pendulum of no fixed phase is in none of the structures."""
    rng = np.random.default_rng(2)
    turn = 2 * np.pi / 9.7
    swing = lfilter([1.0], [1.0, -1.96 * np.cos(turn), 0.9604], rng.normal(size=500))
    at = pd.date_range("2024-01-01", periods=500, freq="h")
    for name, values in (("swing", swing), ("walk", np.cumsum(rng.normal(size=500)))):
        pd.DataFrame({"at": at, "y": values}).to_csv(tmp_path / f"{name}.csv", index=False)
    bad, good = (
        init.run(
            settings(tmp_path), str(tmp_path / f"{name}.csv"), structure="level", no_picture=True, **SMALL
        )
        for name in ("swing", "walk")
    )
    assert bad.data["fits"] is False and good.data["fits"] is True
    (said,) = [line for line in bad.lines if "does not fit" in line]
    assert said.startswith(
        "warning: the model does not fit: of 1 of 1 key innovations are autocorrelated. Next: give"
    )
    assert "--structure " in said and "`compare` both" in said
    assert not any("does not fit" in line for line in good.lines)
    assert any(line.startswith("in their predicted 95 %: 9") for line in good.lines)
    assert load_spec("walk", tmp_path / "models").sinks.latest is True


def test_dates_of_the_picture_do_not_cover_each_other(tmp_path: Path, monkeypatch: Any) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(plt, "close", kept.append)
    folder = files(tmp_path / "loads", 2, 700)
    init.run(settings(tmp_path), str(folder), structure="level", keys=2, rows=100)
    (picture,) = kept
    drawn = 0
    for ax in (one for half in picture.subfigs for one in half.axes):
        low, high = ax.get_xlim()
        labels = [
            one for one in ax.get_xticklabels() if one.get_text() and low <= one.get_position()[0] <= high
        ]
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes)), [one.get_text() for one in labels]
        drawn += len(labels) > 2
    assert drawn == 5


def test_several_measurements_have_a_structure_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    n = 160
    at = pd.date_range("2024-01-01", periods=n, freq="1D").strftime("%Y-%m-%d")
    slope = np.cumsum(np.cumsum(rng.normal(size=n)))
    table = pd.DataFrame({"at": at, "null": 1e6 * slope, "b": 1e-3 * (rng.normal(size=n) + 5), "who": "x"})
    table.to_csv(tmp_path / "two.csv", index=False)
    done = init.run(settings(tmp_path), str(tmp_path / "two.csv"), no_picture=True, **SMALL)
    spec = load_spec("two", tmp_path / "models")
    assert done.data["measurement"] == spec.measurement == ["null", "b"]
    assert done.data["chosen"][0].split()[0] in ("trend", "damped") and done.data["chosen"][1].startswith(
        "level"
    )
    assert spec.states == ["null_level", "null_slope", "b_level"]
    R: Any = spec.model_dump()["observation"]["R"]
    assert 3e-7 < float(R[1][1]) < 3e-6 and float(R[0][1]) == 0.0
    assert 0.7 < done.data["nis_per_component"] < 1.3


def test_one_series_cut_into_files_by_time_has_no_key(tmp_path: Path) -> None:
    rows = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=120), "value": noise(120)})
    (tmp_path / "days").mkdir()
    for month, mine in rows.groupby(rows["day"].dt.month):
        mine.to_csv(tmp_path / "days" / f"{month}.csv", index=False)
    done = init.run(settings(tmp_path), str(tmp_path / "days"), **SMALL)
    spec = load_spec("days", tmp_path / "models")
    assert spec.key == [] and done.data["keys"] == 1 and done.data["picture"] is not None
    one = rows[rows["day"] < "2020-02-01"]
    one.to_csv(tmp_path / "january.csv", index=False)
    alone = init.run(settings(tmp_path), str(tmp_path / "january.csv"), no_picture=True)
    assert alone.data["key_from_name"] == "series"
    assert any("use --no-key if later files continue this one" in note for note in alone.data["notes"])
    whole = init.run(settings(tmp_path), str(tmp_path / "january.csv"), no_key=True, force=True)
    assert whole.data["key"] == [] and load_spec("january", tmp_path / "models").key == []
    with pytest.raises(UserError, match="--no-key says that all rows are one series: leave out --key"):
        init.run(
            settings(tmp_path), str(tmp_path / "january.csv"), no_key=True, key_from_name="file", force=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["season", "trend season"])
def test_a_season_far_longer_than_a_step_is_fitted_and_its_spec_filters_every_row(
    tmp_path: Path, structure: str
) -> None:
    """The first days of a year hardly tell its waves from a level, and the start is diffuse all the same."""
    rng = np.random.default_rng(5)
    n = 740
    year = 2 * np.pi * np.arange(n) / 365.2425
    value = 12 + 8 * np.sin(year) + 2 * np.cos(2 * year) + rng.normal(size=n)
    path = tmp_path / "days.csv"
    pd.DataFrame({"day": pd.date_range("2020-01-01", periods=n), "value": value}).to_csv(path, index=False)
    done = init.run(settings(tmp_path), str(path), structure=structure, no_picture=True)
    assert done.data["failed"] == {} and done.data["chosen"] == [structure]
    assert any(line == f"chosen: {structure}, as --structure asks" for line in done.lines)
    behind = {one["name"]: one["behind"] for one in done.data["structures"]}
    assert behind["season"] < 0.02 < behind["level"]  # it is how the rows were made
    filtered = filter.run(settings(tmp_path), "days", str(path), str(tmp_path / "out.csv"))
    assert filtered.data["flagged"] == 0 and 0.9 < filtered.data["nis_per_component"] < 1.1
    assert f"NIS per measured component {filtered.data['nis_per_component']:.3f}" in "\n".join(done.lines)


def test_a_level_chosen_against_the_average_says_so_in_numbers_of_series() -> None:
    means = np.array([[0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, -1.0, -1.0]])
    scores = [
        ModelScore("level robust", 1, 0.8, 0.6, 0.0, 0.0, 0.6, 0),
        ModelScore("level", 0, 0.0, 0.4, 0.8, 0.2, 1.0, 0),
    ]
    assert explain_structure(Ranking(scores, 5, 100, means), "level") == (
        "the simplest. level robust is better on average (0.800 a row), but worse for 2 of 5 series. To take it: "
        "--structure 'level robust'"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,x\n", "no column is a time; name one with --time"),
        ("at,b\n2024-01-01,x\n2024-01-02,y\n", "no column is a measurement; name one with --measurement"),
        ("at,y\n2024-01-01,1.5\n2024-01-02,2\n", "of short series write the spec yourself"),
        ("at,y\n", "has no rows"),
        ("", "is empty"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=said):
        init.run(settings(tmp_path), str(tmp_path / "a.csv"))
    assert [one.name for one in tmp_path.iterdir()] == ["a.csv"]
    for wrong, error in (("none.csv", "there is no such file"), ("*.csv.gz", "no such file")):
        with pytest.raises(UserError, match=error):
            init.run(settings(tmp_path), str(tmp_path / wrong))


def test_compare_finds_the_better_model_and_says_when_none_is(tmp_path: Path) -> None:
    folder = files(tmp_path / "loads", 3, 100, scale=False)
    init.run(settings(tmp_path), str(folder), structure="season", no_picture=True, **SMALL)
    init.run(settings(tmp_path), str(folder), name="plain", structure="level", no_picture=True, **SMALL)
    text = (tmp_path / "models" / "plain.yaml").read_text()
    (tmp_path / "models" / "twin.yaml").write_text(text.replace("name: plain", "name: twin"))
    found = compare.run(settings(tmp_path), ["plain,loads", "twin"], str(folder))
    assert found.data["best"] == "loads" and found.data["equals"] == ["loads"]
    assert [one["name"] for one in found.data["models"]] == ["loads", "plain", "twin"]
    assert found.data["keys"] == 3 and found.lines[-1] == "loads is the best"
    same = compare.run(settings(tmp_path), ["plain", "twin"], str(folder))
    assert same.data["equals"] == ["plain", "twin"]
    assert same.lines[-1] == "plain has the highest, but cannot be told apart from twin"
    (tmp_path / "models" / "other.yaml").write_text(
        text.replace("[value]", "[row]").replace("plain", "other")
    )
    with pytest.raises(UserError, match="other and plain differ in `measurement`"):
        compare.run(settings(tmp_path), ["plain", "other"], str(folder))
    with pytest.raises(UserError, match="give two models or more"):
        compare.run(settings(tmp_path), ["plain"], str(folder))


@pytest.mark.slow
def test_the_choice_predicts_real_series_no_worse_than_a_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table by itself, as `init` gets it: no table loses, and 95 % of the keys lose nothing beyond their noise."""
    tables = dict(real_series.statsmodels_series())
    tables |= {"routes": real_series.routes(30), "aircraft": real_series.aircraft(60)}
    ranked: list[tuple[Ranking, Sequence[str], Ints, Sequence[Floats]]] = []

    def keep(names: Sequence[str], key: Ints, scores: Sequence[Floats]) -> Ranking:
        ranked.append((rank(names, key, scores), names, key, scores))
        return ranked[-1][0]

    monkeypatch.setattr("jobs.choosing.search.rank", keep)
    keys, worse = 0, 0
    for file, table in tables.items():
        real_series.write(table, tmp_path / f"{file}.csv")
        ranked.clear()
        found = find(str(tmp_path / f"{file}.csv"), Wishes(keys=30, rows=250))
        ranking, names, key, scores = ranked[0]
        chosen = list(names).index(found.choice.names[0])
        assert ranking.means[chosen].mean() >= ranking.means[0].mean(), file
        lost = scores[0] - scores[chosen]
        for one in np.unique(key):
            mine = lost[(key == one) & np.isfinite(lost)]
            keys += 1
            worse += mine.mean() > 2.0 * mine.std(ddof=1) / np.sqrt(len(mine))
    assert keys > 100 and worse <= 0.05 * keys


@pytest.mark.slow
def test_fifty_files_take_seconds(tmp_path: Path) -> None:
    folder = files(tmp_path / "many", 50, 2000)
    start = time.process_time()
    done = init.run(settings(tmp_path), str(folder))
    assert time.process_time() - start < 20.0, done.data["phases"]
    assert done.data["rows"] == 100_000 and done.data["keys"] == 50
