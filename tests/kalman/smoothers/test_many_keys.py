"""Smoothing of more keys than a block holds, in one call: each key has the bits that it has in small company."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.filters.state_layout import BLOCK
from kalman.smoothers.smooth import smooth
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT

KEYS, ROWS = 2 * BLOCK + 77, 4
PROPER = {"mean": [0.0, 0.0], "covariance": [[4.0, 0.0], [0.0, 1.0]]}
PROCESS = {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.1}
MODE = {"process": PROCESS, "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]}}
QUIET = {**MODE, "process": {**PROCESS, "level_variance": 0.01}}
KINDS: dict[str, dict[str, Any]] = {
    "proper": {"initial": PROPER},
    "diffuse": {"initial": {"diffuse": True}},
    "partly diffuse": {"initial": {**PROPER, "diffuse": [True, False], "covariance": [[0, 0], [0, 1]]}},
    "extended": {"filter": "extended", "initial": PROPER},
    "cubature": {"filter": "cubature", "initial": PROPER},
    "imm": {
        "filter": "imm",
        "modes": [MODE, QUIET],
        "transition": [[0.9, 0.1], [0.2, 0.8]],
        "initial": PROPER,
    },
}


@pytest.mark.parametrize(
    ("kind", "lag"), [*((kind, None) for kind in KINDS), *((kind, 2) for kind in KINDS if kind != "imm")]
)
def test_bits_do_not_depend_on_the_number_of_keys(kind, lag):
    written = {"states": ["level", "slope"], "measurement": ["y"], **MODE, **KINDS[kind]}
    if "modes" in written:
        del written["process"], written["observation"]
    model = kalman.build({**written, **({"smoothing": {"lag": lag}} if lag else {})})
    rng = np.random.default_rng(5)
    y = rng.normal(size=(1, KEYS * ROWS))
    y[0, rng.random(KEYS * ROWS) < 0.1] = np.nan
    time = np.cumsum(rng.integers(1, 4, KEYS * ROWS)) * int(UNIT)
    rows = kalman.SortedRows(np.repeat(np.arange(KEYS), ROWS), time, y, np.empty((0, KEYS * ROWS)))
    _, outputs, together = smooth(model, kalman.initial_states(model, KEYS), rows, UNIT)
    # the parts come after the whole, so that memory which the whole forgets to write cannot hold their numbers
    for start in range(0, KEYS, 1000):
        here = (rows.key >= start) & (rows.key < start + 1000)
        count = min(1000, KEYS - start)
        part = rows.take(here)._replace(key=rows.key[here] - start)
        _, outputs_alone, alone = smooth(model, kalman.initial_states(model, count), part, UNIT)
        same(alone.mean, together.mean[:, here])
        same(alone.covariance, together.covariance[:, here])
        for name, values in alone.extra.items():
            same(values, together.extra[name][:, here])
        for name, values in outputs_alone.extra.items():
            same(values, outputs.extra[name][:, here])
