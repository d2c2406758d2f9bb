# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # From a CSV to bands
# The flow of the Nile at Aswan, 1871-1970, from a file of numbers to estimates with their 95 % bands, a check of the
# model and a forecast. No Spark, no warehouse: three commands. Put your own file in place of `nile.csv`.
#
# Open this file in Jupyter (`pip install jupyterlab jupytext`, then "Open as notebook"), in an editor that knows cells,
# or make a notebook of it: `jupytext --to ipynb csv_to_bands.py`.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
DATA = HERE.parents[1] / "tests" / "fixtures" / "nile.csv"
work = Path(tempfile.mkdtemp())
os.environ["KALMAN_WAREHOUSE"] = str(work / "warehouse")


def pipeline(*words: str) -> None:
    """Run kalman-pipeline and print what it says."""
    command = [sys.executable, "-m", "jobs.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    print(done.stdout + done.stderr)
    done.check_returncode()


measured = pd.read_csv(DATA, parse_dates=["at"])
measured.head()

# %% [markdown]
# ## Find a model
# `init` looks at the file, finds which column is what, tries some structures and keeps rows back to see which predicts
# best. It writes a spec: one YAML file, to be edited freely.

# %%
spec = work / "river.yaml"
pipeline("init", "--input", str(DATA), "--name", "river", "--output", str(spec), "--quick", "--no-picture")
print(spec.read_text())

# %% [markdown]
# ## Estimate
# `filter` gives each row the estimate that was possible at its time; `--smooth` adds the one that uses all rows.
# Columns are named after the states: `mean_level`, `covariance_level_level`.

# %%
pipeline(
    "filter", "--model", str(spec), "--input", str(DATA), "--output", str(work / "estimates.csv"), "--smooth"
)
estimates = pd.read_csv(work / "estimates.csv", parse_dates=["at"])
estimates.tail()

# %% [markdown]
# ## Is the model right?
# The normalised innovation squared (NIS) averages to 1 for one measured column, and 95 % of it is below 3.84. That is
# the coverage of the predicted 95 % intervals: where it is far from 95 %, no band below is to be believed.

# %%
nis = estimates["nis"].dropna()
held = f"{np.mean(nis < 3.84):.0%} of rows in their predicted 95 %"
print(f"mean NIS {nis.mean():.2f}, {held}")

# %% [markdown]
# ## Look ahead

# %%
ahead = work / "ahead.csv"
pipeline("forecast", "--model", str(spec), "--input", str(DATA), "--output", str(ahead), "--steps", "10")
forecast = pd.read_csv(ahead, parse_dates=["at"])
forecast.head()

# %% [markdown]
# ## The bands
# Grey: measured. Blue: the estimate at the time; orange: with all rows, as the dam of 1899 shows earlier; green: what
# is to come, where the band is that of the measurement and not of the level alone.

# %%
figure, ax = plt.subplots(figsize=(10, 4.5), layout="constrained")
ax.plot(measured["at"], measured["volume"], ".", color="#8a94a3", label="measured")
for name, colour, label in (("", "#2563a8", "filtered"), ("smoothed_", "#d9700a", "smoothed")):
    mean, deviation = estimates[f"{name}mean_level"], np.sqrt(estimates[f"{name}covariance_level_level"])
    ax.plot(estimates["at"], mean, color=colour, label=f"{label}, 95 % band")
    ax.fill_between(
        estimates["at"],
        mean - 1.96 * deviation,
        mean + 1.96 * deviation,
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
lower, upper = forecast["measurement_lower_volume"], forecast["measurement_upper_volume"]
ax.plot(forecast["at"], forecast["measurement_mean_volume"], color="#2e8540", label="forecast, 95 % band")
ax.fill_between(forecast["at"], lower, upper, color="#2e8540", alpha=0.15, linewidth=0)
ax.set_title(f"the Nile at Aswan · {held}")
ax.set_ylabel("10⁸ m³ a year")
ax.legend(ncols=2)
figure.savefig(work / "bands.png", dpi=120)
print(work / "bands.png")
