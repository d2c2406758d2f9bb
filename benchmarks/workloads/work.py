"""Name the measured streaming works: number of keys, number of rows, model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jobs.specs.model_spec import ModelSpec
from jobs.state.kernel import load_checked_spec

MODELS = Path(__file__).parents[1] / "models"


class Work(NamedTuple):
    """One kind of micro-batch.

    keys: number of keys with a state; rows: rows a key in a dense micro-batch; model: a spec in `benchmarks/models`;
    text: keys are strings of 8 to 20 characters; touched: number of keys with rows in a micro-batch, None for all;
    sink: Spark's format of the written estimates, noop or delta.
    """

    name: str
    keys: int
    rows: int
    model: str = "trend"
    text: bool = False
    touched: int | None = None
    sink: str = "noop"

    @property
    def batch_rows(self) -> int:
        """Return the rows of one measured micro-batch."""
        return (self.keys if self.touched is None else self.touched) * self.rows

    @property
    def spec(self) -> ModelSpec:
        """Return the model's spec."""
        return load_checked_spec(str(MODELS / f"{self.model}.yaml"), MODELS)


DENSE = (
    Work("dense_20k_x5", 20_000, 5),
    Work("dense_200k_x5", 200_000, 5),
    Work("dense_20k_x50", 20_000, 50),
)
DELTA = tuple(work._replace(name=f"{work.name}_delta", sink="delta") for work in DENSE)
"""The same into a Delta table: by the tasks of the operator and delta-rs, and by Delta in Java."""
S3 = DENSE[1]._replace(name=f"{DENSE[1].name}_s3", sink="delta")
"""The same into a Delta table in S3, where the checkpoint is too (`benchmarks.suites.is_in_s3`)."""
SPARSE = Work("sparse_1k_of_2m", 2_000_000, 1, touched=1_000)
TEXT = tuple(work._replace(name=f"{work.name}_text", text=True) for work in DENSE)
KINDS = (
    Work("wide_20k_x5", 20_000, 5, "wide"),
    Work("imm_20k_x5", 20_000, 5, "imm"),
    Work("unscented_20k_x5", 20_000, 5, "unscented"),
)
SCALE = tuple(
    Work(f"scale_{keys // 1000}k", keys, 1, touched=10_000)
    for keys in (5_000_000, 10_000, 100_000, 1_000_000)
)
"""Works with most keys first: their memory is measured too, and Java never returns memory taken by earlier works."""
HISTORY = (
    Work("history_2m_x1", 2_000_000, 1),
    Work("history_20k_x100", 20_000, 100),
)
"""Estimates of every row in batch: one row a key, and a hundred."""
HISTORY_DELTA = tuple(work._replace(name=f"{work.name}_delta", sink="delta") for work in HISTORY)
ALL = (*SCALE, *DENSE, *DELTA, S3, *TEXT, SPARSE, *KINDS)
QUICK = (*SCALE[:2], DELTA[2], DELTA[0])
"""Works that check in minutes the targets for Delta and for few rows into many keys (`benchmarks.targets`)."""
