"""The offline command with robust updates, adaptive noise and several modes: their flags and columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.filter import run
from jobs.specs.model_spec import SpecError

HEAD = """
name: m
version: 1
key: [k]
time: at
measurement: [y]
states: [level]
initial: {mean: [0.0], covariance: [[10.0]]}
"""
WALK = """
process: {kind: random_walk, variance: 1.0e-4}
observation: {R: [[1.0]]}
"""
VALUES = [0.1, -0.2, 0.3, 90.0, 0.0, "", 0.2]


def filtered(folder: Path, text: str, output: str = "out.csv") -> tuple[Report, pd.DataFrame]:
    (folder / "m.yaml").write_text(HEAD + text)
    rows = [f"a,2024-01-01T00:00:{second:02},{value}\n" for second, value in enumerate(VALUES)]
    (folder / "in.csv").write_text("k,at,y\n" + "".join(rows))
    report = run(Settings.load(models=folder), "m", str(folder / "in.csv"), str(folder / output))
    read = pd.read_parquet if output.endswith("parquet") else pd.read_csv
    return report, read(folder / output)


def test_a_gate_flags_the_outlier_and_keeps_it_out_of_the_report(tmp_path: Path) -> None:
    report, out = filtered(tmp_path, WALK + "robust: {gate: {probability: 0.999}}")
    assert out.flag.tolist()[3] == "gated" and out.flag.isna().sum() == 6
    assert out.nis[3] > 1000 and pd.isna(out.log_likelihood[3])
    assert out.mean_level[3] == out.mean_level[2]
    assert report.data["flagged_by_reason"] == {"gated": 1} and report.data["nis_per_component"] < 2


@pytest.mark.parametrize("noise", ["student_t: {degrees: 4}", "huber: {}"])
def test_weights_are_written(tmp_path: Path, noise: str) -> None:
    _, out = filtered(tmp_path, WALK + f"robust: {{{noise}}}\nadaptive: {{R: 0.05}}")
    assert out.weights[3] < 0.05 and out.weights[[0, 1, 2, 4, 6]].min() > 0.5 and pd.isna(out.weights[5])
    assert out.flag.isna().all() and abs(out.mean_level[6]) < 1
    _, out = filtered(tmp_path, WALK + f"robust: {{{noise}}}", "out.parquet")
    assert out.weights[3][0] < 0.05


MODES = """
modes:
  - {name: slow, process: {kind: random_walk, variance: 1.0e-4}}
  - {name: fast, process: {kind: random_walk, variance: 400.0}}
observation: {R: [[1.0]]}
"""


def test_mode_probabilities_are_written(tmp_path: Path) -> None:
    text = "filter: imm\ntransition: [[0.95, 0.05], [0.2, 0.8]]" + MODES
    report, out = filtered(tmp_path, text)
    names = ["mode_probabilities_0", "mode_probabilities_1"]
    np.testing.assert_allclose(out[names].sum(axis=1), 1.0)
    assert out.mode_probabilities_1[3] > 0.999 > 0.5 > out.mode_probabilities_1[2]
    assert out.log_likelihood[5] == 0 and report.data["flagged"] == 0
    _, out = filtered(tmp_path, "filter: mmae\nmmae: {window: 2}" + MODES, "out.parquet")
    assert [len(row) for row in out.mode_probabilities] == [2] * 7
    assert out.mode_probabilities[6][1] > 0.9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("filter: imm" + MODES, "transition: is missing; add it"),
        ("filter: mmae", "modes: is missing; add it"),
        ("transition: [[1.0]]" + WALK, "transition: is for filter: imm or mmae"),
        (
            "filter: mmae\nmmae: {windw: 2}" + MODES,
            "mmae.windw: is not a field of a model spec; did you mean",
        ),
        (
            "filter: mmae" + MODES.replace("400.0", "-1.0"),
            "m.yaml:12: modes[1].process.variance: -1.0 is not",
        ),
        ("filter: mmae" + MODES.replace("random_walk", "random_wlk"), "did you mean 'random_walk'?"),
        (
            "filter: mmae" + MODES + "adaptive: {R: 0.1}",
            "adaptive: modes are told apart by their fixed noise",
        ),
    ],
)
def test_invalid_modes_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        filtered(tmp_path, text)
    assert said in str(caught.value)
