"""Mixtures in specs and through the offline command."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.filter import run
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.state.kernel import check_numerics, load_checked_spec
from kalman import ModelError

HEAD = """
name: m
version: 1
key: [world]
time: year
measurement: [count]
filter: poisson_mixture
"""
WRITTEN = HEAD + "mixture: {components: 2, weights: [0.675726, 0.324274], rates: [15.777108, 26.839895]}\n"
QUAKES = Path(__file__).parents[2] / "fixtures" / "earthquakes.csv"
DOCS = Path(__file__).parents[3] / "docs"


def filtered(folder: Path, text: str, output: str = "out.csv") -> tuple[Report, pd.DataFrame]:
    (folder / "m.yaml").write_text(text)
    rows = pd.read_csv(QUAKES, dtype=str).assign(world="earth")
    rows.loc[[5, 6], "count"] = ["-1", "2.5"]
    rows.to_csv(folder / "in.csv", index=False)
    report = run(Settings.load(models=folder), "m", str(folder / "in.csv"), str(folder / output))
    read = pd.read_parquet if output.endswith("parquet") else pd.read_csv
    return report, read(folder / output)


def test_rows_are_assigned_to_components_and_an_invalid_count_is_flagged(tmp_path: Path) -> None:
    report, out = filtered(tmp_path, WRITTEN)
    assert report.data["flagged_by_reason"] == {"out_of_support": 2}
    assert out["flag"].dropna().index.tolist() == [5, 6]
    both = out[["responsibilities_0", "responsibilities_1"]].drop([5, 6])
    np.testing.assert_allclose(both.sum(axis=1), 1.0, rtol=1e-12)
    assert out.loc[0, "log_likelihood"] == pytest.approx(-2.8524636034599595, rel=1e-9)
    assert {"mean_count", "covariance_count_count", "nis"} <= set(out.columns)
    _, lists = filtered(tmp_path, WRITTEN, "out.parquet")
    np.testing.assert_allclose(np.stack(list(lists["responsibilities"].drop([5, 6]))), both, rtol=1e-9)


def test_the_states_are_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(WRITTEN)
    spec = load_checked_spec(path)
    assert spec.states == ["count"]
    path.write_text(WRITTEN + "states: [count]\n")
    assert load_checked_spec(path).fingerprint() == spec.fingerprint()
    path.write_text(WRITTEN + "states: [a, b]\n")
    with pytest.raises(SpecError, match="states: 2 named for 1 measurements"):
        load_checked_spec(path)
    path.write_text(HEAD)
    with pytest.raises(SpecError, match="mixture: is missing"):
        load_spec(path)
    path.write_text(WRITTEN.replace("poisson_mixture", "rls") + "states: [a]\n")
    with pytest.raises(SpecError, match="mixture: is for filter: gaussian_mixture or poisson_mixture or"):
        load_spec(path)


def test_components_that_must_be_learned_are_refused(tmp_path: Path) -> None:
    text = HEAD + "mixture: {components: 2}\nlearn: {parameters: [weights, rates]}\n"
    with pytest.raises((UserError, ModelError), match=r"mixture\.rates.*pretrain"):
        filtered(tmp_path, text)
    assert not (tmp_path / "out.csv").exists()
    (tmp_path / "m.yaml").write_text(HEAD + "mixture: {components: 2}\n")
    with pytest.raises(SpecError, match=r"mixture\.rates: is missing"):
        load_checked_spec(tmp_path / "m.yaml")


def test_the_guides_examples_are_valid_specs() -> None:
    section = (DOCS / "filters.md").read_text().split("## Mixtures")[1].split("\n## ")[0]
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", section, re.S)]
    assert len(examples) == 5
    for example in examples:
        base = {"name": "m", "version": 1, "key": ["k"], "time": "t", "filter": "gaussian_mixture"}
        check_numerics(ModelSpec.model_validate({**base, "measurement": ["a", "b"], **example}))
