"""Draw the pictures of filters.md from published series: `python scripts/pictures.py` (needs the extras demo and dev).

The Nile's flow 1871-1970, great earthquakes 1900-2006 and Old Faithful's waiting times are in tests/fixtures; carbon
dioxide at Mauna Loa and the macroeconomic series come with statsmodels. Nothing is random: the same versions draw the
same files.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kalman  # noqa: E402
from jobs import filter  # noqa: E402
from jobs.core.settings import Settings  # noqa: E402
from jobs.offline.estimate_pictures import draw_keys  # noqa: E402
from jobs.offline.estimate_series import read_file_series  # noqa: E402
from jobs.offline.plots import BAND, BOUND, ESTIMATE, MEASURED, SMOOTHED, STYLE  # noqa: E402
from jobs.state.kernel import load_checked_spec  # noqa: E402
from kalman.evaluation.forecast import forecast  # noqa: E402
from kalman.smoothers.smooth import Smoothed, smooth  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIXTURES, PICTURES = ROOT / "tests" / "fixtures", ROOT / "docs" / "pictures"
SOAK = Path(os.environ.get("KALMAN_SOAK_RECORD") or ROOT / "benchmarks" / "results" / "soak.json")
STEP = 1_000_000
GREEN = "#2e8540"
Drawing = tuple[Any, Any]


def filtered(
    definition: dict[str, Any], y: Any, time: Any = None, u: Any = None, smoothing: bool = False
) -> tuple[kalman.KeyStates, kalman.Outputs, Smoothed | None]:
    """Filter and smooth one series (N,), with a row for each time unit if no times are given."""
    y = np.atleast_2d(np.asarray(y, float))
    count = y.shape[1]
    at = np.arange(count) * STEP if time is None else np.round(np.asarray(time) * STEP).astype(np.int64)
    controls = np.empty((0, count)) if u is None else np.atleast_2d(np.asarray(u, float))
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.zeros(count, np.int64), at, y, controls)
    start = kalman.initial_states(model, 1)
    if smoothing:
        return smooth(model, start, rows, STEP)
    return *kalman.run(model, start, rows, STEP), None


def band(axes: Axes, x: Any, mean: Any, variance: Any, colour: str, label: str) -> None:
    """Draw a line and the band that holds 95 %."""
    axes.plot(x, mean, color=colour, linewidth=1.4, label=label)
    half = BAND * np.sqrt(variance)
    axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def figure(rows: int = 1, height: float = 2.6, ratios: Sequence[float] | None = None) -> Drawing:
    """Return a figure of our width and its axes."""
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(
        rows, 1, figsize=(7.2, height), sharex=rows > 1, height_ratios=ratios, layout="constrained"
    )
    return made, np.atleast_1d(axes)


def nile() -> tuple[np.ndarray, np.ndarray]:
    """Return years and flow."""
    flow = pd.read_csv(FIXTURES / "nile.csv")["volume"].to_numpy(float)
    return np.arange(1871, 1871 + len(flow)), flow


def level(**sections: Any) -> dict[str, Any]:
    """Return the local level model of the Nile (Durbin and Koopman 2012), with other sections."""
    return {
        "states": ["level"],
        "measurement": ["volume"],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1469.1]]},
        "observation": {"H": [[1.0]], "R": [[15099.0]]},
        "initial": {"diffuse": True},
        **sections,
    }


def linear() -> Drawing:
    """Draw the Nile, filtered and smoothed, with two gaps."""
    years, flow = nile()
    gaps = flow.copy()
    gaps[20:40] = gaps[60:80] = np.nan
    _, out, smoothed = filtered(level(), gaps, smoothing=True)
    assert smoothed is not None
    made, (axes,) = figure()
    axes.plot(years, gaps, ".", color=MEASURED, label="measured")
    band(axes, years, out.mean[0], out.covariance[0], ESTIMATE, "filter: given the rows before")
    band(axes, years, smoothed.mean[0], smoothed.covariance[0], SMOOTHED, "smoother: given all rows")
    axes.set(title="linear: the Nile at Aswan with two gaps of 20 years", ylabel="10⁸ m³", ylim=(300, 1700))
    axes.legend(ncols=3, loc="upper right", fontsize=8)
    return made, [axes]


def structures() -> Drawing:
    """Draw carbon dioxide at Mauna Loa: trend and seasons, weeks missing, three years forecast."""
    from statsmodels.datasets import co2

    loaded: Any = co2.load_pandas()
    data = loaded.data["co2"]
    data = data[data.index.year >= 1988]
    years = (data.index.year + (data.index.dayofyear - 1) / 365.25).to_numpy()
    definition = {
        "states": ["level", "slope", "s1", "c1", "s2", "c2"],
        "measurement": ["co2"],
        "process": {
            "kind": "sum",
            "parts": [
                {"kind": "local_linear_trend", "level_variance": 0.4, "slope_variance": 0.05},
                {"kind": "seasonal_trigonometric", "period": 1.0, "harmonics": 2, "variance": 0.02},
            ],
        },
        "observation": {"R": [[0.06]]},
        "initial": {"diffuse": True},
    }
    states, _, _ = filtered(definition, data.to_numpy(), years - years[0])
    ahead = forecast(kalman.build(definition), states, np.full((156, 1), 1 / 52))
    later = years[-1] + np.arange(1, 157) / 52
    made, (axes,) = figure()
    axes.plot(years, data, ".", markersize=2.5, color=MEASURED, label="measured weekly, some weeks missing")
    mean, variance = ahead.measurement_mean[0, :, 0], ahead.measurement_covariance[0, :, 0]
    band(axes, later, mean, variance, ESTIMATE, "forecast, 95 %")
    axes.set(title="named structures: trend + seasons of CO₂ at Mauna Loa", ylabel="ppm")
    axes.set_xticks(range(1988, 2006, 2))
    axes.legend(loc="upper left", fontsize=8)
    return made, [axes]


def modes() -> Drawing:
    """Draw the Nile with two modes: a calm level and one that jumps."""
    years, flow = nile()
    definition = level(
        filter="imm",
        process=None,
        modes=[
            {"name": "calm", "process": {"kind": "explicit", "F": [[1.0]], "Q": [[10.0]]}},
            {"name": "jump", "process": {"kind": "explicit", "F": [[1.0]], "Q": [[50_000.0]]}},
        ],
        transition=[[0.98, 0.02], [0.5, 0.5]],
        initial={"mean": [1000.0], "covariance": [[1e6]]},
    )
    _, out, smoothed = filtered(definition, flow, smoothing=True)
    assert smoothed is not None
    made, (above, below) = figure(2, 3.6, (2.2, 1))
    above.plot(years, flow, ".", color=MEASURED, label="measured")
    band(above, years, out.mean[0], out.covariance[0], ESTIMATE, "filter")
    band(above, years, smoothed.mean[0], smoothed.covariance[0], SMOOTHED, "smoother")
    above.set(title="imm: the Nile's level is calm, or jumps", ylabel="10⁸ m³")
    above.legend(ncols=3, loc="upper right", fontsize=8)
    below.plot(years, out.extra["mode_probabilities"][1], color=ESTIMATE, linewidth=1.2)
    below.plot(years, smoothed.extra["mode_probabilities"][1], color=SMOOTHED, linewidth=1.4)
    below.set(ylabel="P(jump)", ylim=(0, 1))
    return made, [above, below]


def robust() -> Drawing:
    """Draw the Nile with one reading ten times too large, filtered with Gaussian and with Student-t noise."""
    years, flow = nile()
    slip = flow.copy()
    slip[50] *= 10
    made, (axes,) = figure()
    axes.plot(years, slip, ".", color=MEASURED, label="measured; 1921 with a zero too many")
    for options, colour, label in (
        ({}, BOUND, "plain"),
        ({"student_t": {"degrees": 4}}, ESTIMATE, "student_t"),
    ):
        _, out, _ = filtered(level(robust=options or None), slip)
        axes.plot(years, out.mean[0], color=colour, linewidth=1.5, label=label)
    axes.set(title="robust: one absurd measurement", ylabel="10⁸ m³", ylim=(300, 3600))
    axes.legend(loc="upper left", fontsize=8)
    return made, [axes]


def exponential(x: Any) -> Any:
    """Return the rate of the logarithm of a rate."""
    return np.exp(x)


def non_linear() -> Drawing:
    """Draw earthquakes: counts with a rate whose logarithm is a random walk, by a tangent and by sigma points."""
    data = pd.read_csv(FIXTURES / "earthquakes.csv")
    years, counts = data["year"].str[:4].astype(int).to_numpy(), data["count"].to_numpy(float)
    made, (axes,) = figure()
    axes.plot(years, counts, ".", color=MEASURED, label="counted")
    for kind, colour, style in (("extended", SMOOTHED, "--"), ("unscented", ESTIMATE, "-")):
        definition = {
            "filter": kind,
            "states": ["log_rate"],
            "measurement": ["count"],
            "process": {"kind": "random_walk", "variance": 0.02},
            "observation": {"h": "docs.pictures:exponential", "R": [[20.0]]},
            "initial": {"mean": [2.0], "covariance": [[1.0]]},
        }
        _, out, _ = filtered(definition, counts)
        axes.plot(years, np.exp(out.mean[0]), style, color=colour, linewidth=1.5, label=kind)
        if kind == "unscented":
            half = BAND * np.sqrt(out.covariance[0])
            low, high = np.exp(out.mean[0] - half), np.exp(out.mean[0] + half)
            axes.fill_between(years, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(
        title="extended, unscented, cubature: the rate of great earthquakes, by its logarithm",
        ylabel="a year",
    )
    axes.set(ylim=(0, 45))
    axes.legend(ncols=3, loc="upper left", fontsize=8)
    return made, [axes]


def adaptive() -> Drawing:
    """Draw inflation in the United States, whose noise changed, with an adaptive R."""
    from statsmodels.datasets import macrodata

    loaded: Any = macrodata.load_pandas()
    data = loaded.data
    when, inflation = data["year"] + (data["quarter"] - 1) / 4, data["infl"].to_numpy(float)
    definition = level(
        process={"kind": "explicit", "F": [[1.0]], "Q": [[0.3]]},
        observation={"H": [[1.0]], "R": [[2.0]]},
        adaptive={"R": 0.03},
    )
    model = kalman.build(definition)
    states, at, deviation = kalman.initial_states(model, 1), [], []
    out: list[np.ndarray] = []
    for k, value in enumerate(inflation):
        row = kalman.SortedRows(
            np.zeros(1, np.int64), np.array([k * STEP]), np.array([[value]]), np.empty((0, 1))
        )
        states, said = kalman.run(model, states, row, STEP)
        out.append(np.array([said.mean[0, 0], said.covariance[0, 0]]))
        deviation.append(float(np.sqrt(states.values[model.places["parameters"]][0, 0])))  # type: ignore[attr-defined]
        at.append(when[k])
    made, (above, below) = figure(2, 3.4, (2, 1))
    mean, variance = np.array(out).T
    above.plot(when, inflation, ".", markersize=3.5, color=MEASURED, label="measured")
    band(above, when, mean, variance, ESTIMATE, "filter")
    above.set(title="adaptive: inflation in the United States", ylabel="% a year")
    above.legend(ncols=2, loc="upper right", fontsize=8)
    below.plot(at, deviation, color=SMOOTHED, linewidth=1.4)
    below.set(ylabel="noise, sd", ylim=(0, None))
    return made, [above, below]


def regression() -> Drawing:
    """Draw the relation of unemployment and growth (Okun's law): RLS with forgetting, and NLMS."""
    from statsmodels.datasets import macrodata

    loaded: Any = macrodata.load_pandas()
    data = loaded.data
    growth = 100 * np.diff(np.log(data["realgdp"].to_numpy(float)))
    change = np.diff(data["unemp"].to_numpy(float))
    when = (data["year"] + (data["quarter"] - 1) / 4).to_numpy()[1:]
    made, (axes,) = figure()
    for kind, colour, section in (
        ("rls", ESTIMATE, {"forgetting": 0.98}),
        ("nlms", SMOOTHED, {"step": 0.05}),
    ):
        definition = {
            "filter": kind,
            "states": ["base", "slope"],
            "measurement": ["unemployment"],
            "control": ["growth"],
            kind: section,
        }
        _, out, _ = filtered(definition, change, u=growth)
        if kind == "rls":
            band(axes, when[8:], out.mean[1, 8:], out.covariance[2, 8:], colour, "rls, forgetting 0.98")
        else:
            axes.plot(when[8:], out.mean[1, 8:], color=colour, linewidth=1.2, label="nlms, step 0.05")
    axes.set(title="regression: unemployment by growth, a quarter", ylabel="points a percent")
    axes.legend(ncols=2, loc="upper right", fontsize=8)
    return made, [axes]


def mixtures() -> Drawing:
    """Draw Old Faithful's waiting times and the final mixture of online EM."""
    waiting = pd.read_csv(FIXTURES / "faithful.csv")["waiting"].to_numpy(float)
    definition = {
        "filter": "gaussian_mixture",
        "measurement": ["waiting"],
        "mixture": {
            "components": 2,
            "means": [60.0, 75.0],
            "covariances": [100.0, 100.0],
            "step": {"decay": 0.6, "offset": 20},
        },
    }
    states, _, _ = filtered(definition, waiting)
    model: Any = kalman.build(definition)
    x = np.linspace(38, 100, 300)
    parts = [states.values[model.places[name], 0] for name in ("weights", "means", "covariances")]
    made, (axes,) = figure()
    axes.hist(
        waiting,
        bins=np.arange(40, 100, 3),
        density=True,
        color=MEASURED,
        alpha=0.5,
        label="272 waiting times",
    )
    total = np.zeros(len(x))
    for (weight, mean, variance), colour in zip(zip(*parts, strict=True), (SMOOTHED, GREEN), strict=True):
        density = weight * np.exp(-0.5 * (x - mean) ** 2 / variance) / np.sqrt(2 * np.pi * variance)
        axes.plot(x, density, color=colour, linewidth=1.3, label=f"{weight:.2f} at {mean:.1f}")
        total += density
    axes.plot(x, total, color=ESTIMATE, linewidth=1.6, label="mixture after the last row")
    axes.set(title="gaussian_mixture: Old Faithful, one row at a time", xlabel="minutes", yticks=[])
    axes.legend(loc="upper left", fontsize=8)
    return made, [axes]


def soak() -> Drawing:
    """Draw the record of `tests/jobs/test_hour_soak.py`."""
    record = json.loads(SOAK.read_text())
    memory, batches = record["memory"], record["batches"]
    made, axes = figure(4, 6.4)
    minutes = np.array(memory["at"]) / 60
    for name, colour in (("spark", ESTIMATE), ("workers", SMOOTHED), ("driver", GREEN)):
        axes[0].plot(minutes, np.array(memory[name]) / 2**20, color=colour, linewidth=1.2, label=name)
    if record.get("heap"):
        heap = {name: values[::4] for name, values in record["heap"].items()}
        left = np.array(heap["left"]) / 2**20
        axes[0].plot(
            np.array(heap["at"]) / 60, left, ".", color=MEASURED, markersize=1, label="left in the heap"
        )
    axes[0].set_ylabel("memory, MiB")
    axes[0].legend(ncols=4, loc="center right")
    minutes = np.array(batches["at"]) / 60
    axes[1].plot(minutes, np.array(batches["state_bytes"]) / 2**20, color=ESTIMATE, linewidth=1.2)
    axes[1].set_ylabel("state, MiB")
    axes[2].plot(minutes, batches["seconds"], ".", color=MEASURED, markersize=2)
    axes[2].set_ylabel("micro-batch, s")
    axes[3].plot(minutes, batches["lag_seconds"], ".", color=MEASURED, markersize=2)
    axes[3].set_ylabel("lag, s")
    axes[3].set_xlabel("minutes")
    for one in axes:
        one.set_ylim(bottom=0)
    keys, rate = record["keys"], record["rate"]
    axes[0].set_title(f"{rate:,} rows/s of {keys:,} keys, a micro-batch every {record['trigger']:g} s")
    return made, axes


def estimates() -> Drawing:
    """Draw the estimates of the Nile as `kalman-pipeline plot` does, filtered and smoothed."""
    spec = load_checked_spec("nile", ROOT / "models")
    settings = Settings.load(models=ROOT / "models", quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        out, source = f"{folder}/out.csv", str(FIXTURES / "nile.csv")
        filter.run(settings, "nile", source, out, smooth=True, snapshot="none")
        found = read_file_series(spec, Path(out), source, [], 1)
    return draw_keys(found, "The annual flow of the Nile at Aswan, in 10^8 cubic metres"), None


PICTURE: dict[str, Callable[[], Drawing]] = {
    "estimates": estimates,
    "linear": linear,
    "structures": structures,
    "non_linear": non_linear,
    "modes": modes,
    "robust": robust,
    "adaptive": adaptive,
    "regression": regression,
    "mixtures": mixtures,
}
RECORDED: dict[str, Callable[[], Drawing]] = {"soak": soak}
"""Pictures drawn only when named, as SVG, from the record of a long run."""


def main() -> int:
    """Draw all pictures, or the named ones."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURE:
        made, _ = (PICTURE | RECORDED)[name]()
        path = PICTURES / (f"{name}.svg" if name in RECORDED else f"{name}.png")
        made.savefig(path, dpi=110, metadata={"Date": None} if name in RECORDED else {"Software": None})
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
