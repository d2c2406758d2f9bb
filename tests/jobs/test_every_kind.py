"""Every kind of filter and option: history, the stream's operator and the filter alone give the same bits; no Spark.

A kind, a structure or an option that the registries know and no case has fails a test here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark.sql.streaming.tws_tester import TwsTester
from pyspark.sql.types import DoubleType, LongType, StructField, StructType, TimestampType

from jobs import filter as offline
from jobs.batch.bucket_estimates import EstimatingPlan, build_estimator, list_smoothed_widths
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.specs import filter_options, row_order, sections
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.estimates import estimate_batch
from jobs.state.encoding.packets import OutputPacket, RowPacket, join_records
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.rows import build_row_packer, encode_tick
from jobs.state.kernel import load_checked_spec
from jobs.state.plan import Plan as StreamPlan
from jobs.streaming.processors import EventTimeProcessor, FilterProcessor
from kalman.building.registry import FILTERS
from kalman.filters.rounded import find_storage_dtype
from kalman.models.structures import STRUCTURES
from kalman.types import ModelError
from tests.jobs.support.pipeline import Pipeline, random_walk_spec
from tests.jobs.test_kinds import EXPLICIT, FUNCTIONS, MIXTURE, MODULE

NUMBERS = ("a", "b", "c", "d", "count", "yes", "color")
"""Number columns of the rows: two measurements that may be missing, two controls, counts, 0 or 1, and codes 0 to 2."""
SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("at", TimestampType()),
        *(StructField(name, DoubleType()) for name in NUMBERS),
        StructField("message", LongType()),
    ]
)
HOUR = pd.Timedelta("1h")
BUCKETS = 2

BARE: dict[str, Any] = {"process": None, "observation": None, "initial": None}
REGRESSION: dict[str, Any] = {**BARE, "states": ["c0", "c1"], "measurement": ["a"], "control": ["c"]}
MODES: dict[str, Any] = {
    "modes": [EXPLICIT, {**EXPLICIT, "process": {**EXPLICIT["process"], "Q": [[9.0, 0.0], [0.0, 1.0]]}}],
    "process": None,
    "observation": None,
}
SEEN: dict[str, Any] = {"observation": {"H": [[1.0], [0.5]], "R": [[1.0, 0.3], [0.3, 2.0]]}}


def one_state(**process: Any) -> dict[str, Any]:
    """Return a model of a single state."""
    return {
        "states": ["x"],
        "process": process,
        "observation": {"H": [[1.0], [0.5]], "R": [[1.0, 0.3], [0.3, 2.0]]},
        "initial": {"mean": [0.1], "covariance": [[4.0]]},
    }


def states(count: int, process: dict[str, Any]) -> dict[str, Any]:
    """Return a model of several states, of which the first and the last are measured."""
    first = [float(i == 0) for i in range(count)]
    last = [float(i == count - 1) for i in range(count)]
    return {
        "states": [f"x{i}" for i in range(count)],
        "process": process,
        "observation": {"H": [first, last], "R": [[1.0, 0.3], [0.3, 2.0]]},
        "initial": {"mean": [0.0] * count, "covariance": np.diag([4.0] * count).tolist()},
    }


CASES: dict[str, dict[str, Any]] = {
    # Filters and their forms.
    "linear": {},
    "square root": {"form": "square_root"},
    "information": {"form": "information"},
    "extended": {**FUNCTIONS, "filter": "extended"},
    "wrapped angles": {
        **FUNCTIONS,
        "filter": "extended",
        "observation": {
            "h": "sideways:turn",
            "R": [[1.0, 0.3], [0.3, 2.0]],
            "wrap": {"b": "radians"},
        },
    },
    "unscented": {**FUNCTIONS, "unscented": {"alpha": 0.9, "beta": 2.0, "kappa": 1.0}},
    "unscented in square roots": {**FUNCTIONS, "form": "square_root"},
    "cubature": {**FUNCTIONS, "filter": "cubature"},
    "rls": {**REGRESSION, "filter": "rls", "rls": {"forgetting": 0.98, "delta": 2.0}},
    "lms": {**REGRESSION, "filter": "lms", "lms": {"step": 0.05}, "observation": {"R": [[1.0]]}},
    "nlms": {**REGRESSION, "filter": "nlms", "nlms": {"step": 0.4, "epsilon": 1e-3}, "outputs": {}},
    "imm": {
        **MODES,
        "filter": "imm",
        "transition": [[0.95, 0.05], [0.2, 0.8]],
        "imm": {"floor": 1e-6},
        "initial": {
            "mean": [0.0, 0.0],
            "covariance": [[9.0, 0.0], [0.0, 1.0]],
            "mode_probabilities": [0.7, 0.3],
        },
    },
    "mmae": {**MODES, "filter": "mmae", "mmae": {"window": 5, "floor": 1e-9}},
    "gaussian mixture": {
        **MIXTURE,
        "mixture": {
            **MIXTURE["mixture"],
            "components": 2,
            "weights": [0.4, 0.6],
            "warm_up": 3,
            "floor": 1e-5,
            "step": {"decay": 0.7, "offset": 10.0, "minimum": 0.01},
        },
    },
    "mixture by columns": {
        **MIXTURE,
        "control": ["c", "d", "yes"],
        "mixture": {
            **MIXTURE["mixture"],
            "step": {"decay": 0.8, "offset": "d", "minimum": "yes"},
            "batch": "c",
        },
    },
    "poisson mixture": {
        **BARE,
        "filter": "poisson_mixture",
        "measurement": ["count"],
        "states": ["count"],
        "mixture": {"rates": [[2.0], [9.0]]},
    },
    "bernoulli mixture": {
        **BARE,
        "filter": "bernoulli_mixture",
        "measurement": ["yes"],
        "states": ["yes"],
        "mixture": {"probabilities": [[0.2], [0.9]], "batch": 3},
    },
    "categorical mixture": {
        **BARE,
        "filter": "categorical_mixture",
        "measurement": ["color"],
        "states": ["color_0", "color_1", "color_2"],
        "mixture": {"categories": 3, "probabilities": [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]},
    },
    # Structures. The first is that of `linear`.
    "random walk": one_state(kind="random_walk", variance=0.5),
    "ornstein uhlenbeck": one_state(kind="ornstein_uhlenbeck", rate=0.01, variance=2.0, mean=1.0),
    "damped trend": {
        "process": {"kind": "damped_trend", "level_variance": 0.5, "slope_variance": 0.01, "damping": 0.02}
    },
    "constant velocity": states(2, {"kind": "constant_velocity", "acceleration_variance": 1e-4}),
    "constant acceleration": states(3, {"kind": "constant_acceleration", "jerk_variance": 1e-8}),
    "seasonal dummy": states(3, {"kind": "seasonal_dummy", "period": 4, "variance": 0.2}),
    "seasonal trigonometric": states(
        4, {"kind": "seasonal_trigonometric", "period": 1440.0, "variance": 1e-3, "harmonics": 2}
    ),
    "continuous": states(
        2, {"kind": "continuous", "A": [[0.0, 1.0], [-0.01, -0.02]], "diffusion": [[0.1, 0.0], [0.0, 0.01]]}
    ),
    "sum": states(
        3,
        {
            "kind": "sum",
            "parts": [
                {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 1e-4},
                {"kind": "ornstein_uhlenbeck", "rate": 0.01, "variance": 1.0},
            ],
        },
    ),
    "controls in the matrices": {
        "control": ["c", "d"],
        "process": {**EXPLICIT["process"], "B": [[1.0, 0.0], [0.0, 0.5]], "offset": [0.1, "c"]},
        "observation": {
            "H": [[1.0, "c"], [0.5, 1.0]],
            "R": [["d", 0.3], [0.3, 2.0]],
            "offset": ["d", 0.0],
            "noise_scale": "c",
        },
        "outputs": {"control": True, "matrices": ["F", "H", "Q", "R"]},
    },
    # Outliers, noise, storage, lag.
    "gate": {"robust": {"gate": {"probability": 0.95, "limit": 2}}},
    "gate by a threshold": {"robust": {"gate": {"threshold": 6.0}}},
    "student": {"robust": {"student_t": {"degrees": 4.0, "iterations": 5}}},
    "huber": {"robust": {"huber": {"threshold": 1.5, "iterations": 4}}},
    "fading": {"robust": {"fading": 1.02}},
    "adaptive": {"adaptive": {"R": 0.05, "Q": 0.02}},
    "adaptive unscented": {**FUNCTIONS, "adaptive": {"R": 0.05}},
    "fixed lag": {"smoothing": {"lag": 3}},
    "32 bits": {"storage": {"dtype": "float32"}},
    # Starts.
    "diffuse": {"initial": {"diffuse": True}},
    "start from columns": {
        "control": ["c", "d"],
        "initial": {"mean": ["c", 0.0], "covariance": [["d", 0.0], [0.0, 1.0]]},
    },
    "parameters by key": {"learn": {"parameters": ["level_variance", "R"], "scope": "key"}},
    # Outputs.
    "outputs": {
        "outputs": {
            "covariance": "diagonal",
            "innovation": True,
            "measured": True,
            "residual": True,
            "state_index": True,
            "sliding_log_likelihood": 3,
        }
    },
    # Order, duplicates, expiry.
    "strict": {"order": {"kind": "strict", "delay": "1h"}},
    "replay": {"order": {"kind": "replay", "rows": 40}},
    "late applied": {"late": "apply"},
    "duplicates": {"duplicates": {"action": "drop"}},
    "duplicates by id": {"duplicates": {"id": "message", "within": "1h"}},
    "expiry": {"expiry": {"after": "6h"}},
    "expiry to an archive": {"expiry": {"after": "6h", "returns": "archive"}},
}
SLID = {"sliding_log_likelihood": 2, "state_index": True}
"""What all cases put out whose own outputs are not written."""

WITHOUT_BEARING = {
    "Mixture.starts": "of learning",
    "Mixture.holdout": "of learning",
    "Order.patience": "tells when waiting rows are due if none come, and history waits for none",
    "Expiry.clock": "of the machine, which history does not know",
    "Mode.name": "a name",
    "Mode.filter": "in tests/kalman/filters/test_modes.py, as are the next two",
    "Mode.robust": "see above",
    "Mode.unscented": "see above",
}
"""Options that no case has, and why."""
SECTIONS: tuple[type[BaseModel], ...] = tuple(
    one
    for module in (filter_options, row_order, sections)
    for one in vars(module).values()
    if isinstance(one, type)
    and issubclass(one, BaseModel)
    and one.__module__ == module.__name__
    and one.__name__ in {
        *("GateOptions", "StudentTOptions", "HuberOptions", "RobustOptions", "AdaptiveOptions"),
        *("Mode", "Imm", "Mmae", "Rls", "Lms", "Nlms"),
        *("MixtureStep", "Mixture", "Duplicates", "Expiry", "Order", "Initial", "Unscented", "Smoothing"),
        *("Storage", "OutputsSection"),
    }
)  # fmt: skip
NOT_SMOOTHED = {
    *("rls", "lms", "nlms", "mmae", "gaussian mixture", "poisson mixture", "bernoulli mixture"),
    *("categorical mixture", "mixture by columns"),
}
"""Cases whose filters refuse `--smooth`."""


def spec_of(case: str) -> dict[str, Any]:
    return random_walk_spec(**{"outputs": SLID, **CASES[case]})


def set_fields(model: BaseModel) -> Iterator[str]:
    """Yield `Section.field` for each field that a spec sets, in all of its sections."""
    for name in model.model_fields_set:
        value = getattr(model, name)
        yield f"{type(model).__name__}.{name}"
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                yield from set_fields(one)


def test_every_filter_structure_form_and_option_has_a_case() -> None:
    specs = [ModelSpec.model_validate(spec_of(case)) for case in CASES]
    assert {spec.filter for spec in specs} == set(FILTERS)
    kinds = {spec_of(case)["process"]["kind"] for case in CASES if spec_of(case)["process"]}
    assert kinds == {*STRUCTURES, "function"}
    forms = {form for one in get_args(ModelSpec.model_fields["form"].annotation) for form in get_args(one)}
    assert {spec.form for spec in specs} - {None} == forms - {"covariance"}
    assert {spec.order.kind for spec in specs} == {"as-arrived", "strict", "replay"}
    found = {name for spec in specs for name in set_fields(spec)}
    options = {f"{one.__name__}.{name}" for one in SECTIONS for name in one.model_fields}
    assert len(SECTIONS) == 21
    assert options - found == set(WITHOUT_BEARING)


def rows_for(case: str) -> pd.DataFrame:
    """Return rows of 12 keys over two days, ordered by time, with gaps, missing components and equal times."""
    rng = np.random.default_rng(5)
    size = 300
    minute = np.sort(rng.integers(0, 48 * 60, size))
    values = rng.normal(size=(2, size)) * np.where(rng.random(size) < 0.05, 8.0, 1.0)
    values[rng.random((2, size)) < 0.15] = np.nan
    frame = pd.DataFrame(
        {
            "id": rng.integers(0, 12, size),
            "at": (pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(minute, "min")).as_unit("us"),
            "a": values[0],
            "b": values[1],
            "c": rng.uniform(0.5, 1.5, size),
            "d": rng.uniform(0.5, 1.5, size),
            "count": rng.poisson(5.0, size).astype(float),
            "yes": (rng.random(size) < 0.6).astype(float),
            "color": rng.integers(0, 3, size).astype(float),
            "message": np.arange(size),
        }
    )
    if "order" in CASES[case] or "duplicates" in CASES[case]:
        frame = frame.drop_duplicates(["id", "at"])
    return frame.reset_index(drop=True)


def micro_batches(case: str, rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the rows as they arrive: micro-batches of some hours; with an order across them, up to half an hour late.

    Rows are repeated in the same micro-batch, or in the next one if their ids tell.
    """
    arrival = rows["at"]
    if CASES[case].get("order", {}).get("kind") in ("strict", "replay"):
        late = np.random.default_rng(6).integers(0, 30, len(rows))
        arrival = arrival + pd.to_timedelta(late, "min")
    number = np.asarray((arrival - rows["at"].min()) // pd.Timedelta(hours=7))
    parts = [rows.iloc[np.flatnonzero(number == one)] for one in range(number.max() + 1)]
    if "duplicates" not in CASES[case]:
        return parts
    repeated = parts if "id" not in CASES[case]["duplicates"] else [parts[0].head(0), *parts[:-1]]
    pairs = zip(parts, repeated, strict=True)
    return [pd.DataFrame(pd.concat([part, again.tail(3)])) for part, again in pairs]


def packed(plan: EstimatingPlan | StreamPlan, frame: pd.DataFrame, buckets: int) -> Iterator[pa.RecordBatch]:
    """Yield the packets of rows, as Spark would hand them to the packer."""
    columns = {f"n{i}": frame[name].to_numpy() for i, name in enumerate(plan.rows.numbers)}
    time = pa.Array.from_pandas(frame["at"]).cast(pa.timestamp("us", tz="UTC"))
    table = pa.table({"identity": frame["id"].to_numpy(), "time": time, **columns})
    if plan.rows.row_id is not None:
        table = table.append_column("_row_id", pa.array(frame["message"]))
    yield from build_row_packer(plan.rows, make_routing(buckets, 1), typed=True)(
        iter(table.combine_chunks().to_batches())
    )


def runtime_of(pipeline: Pipeline) -> ModelRuntime:
    return ModelRuntime(load_checked_spec("walk", pipeline.settings.models), {}, SCHEMA)


def of_history(runtime: ModelRuntime, arrived: list[pd.DataFrame], smooth: bool) -> pd.DataFrame:
    """Return what `estimate` gives."""
    out = runtime.estimates
    if smooth:
        out = out._replace(extra=(*out.extra, *list_smoothed_widths(runtime.kernel, out.diagonal)))
    layout = build_state_layout(runtime.kind, runtime.kernel.size, find_storage_dtype(runtime.kernel))
    plan = EstimatingPlan(
        runtime.kernel, runtime.spec.unit_us, runtime.rows, layout, out, idle=runtime.spec.idle_us,
        smooth=smooth, only_own=True,
    )  # fmt: skip
    given = [packet for part in arrived for packet in packed(plan, part, 3)]
    found = pa.Table.from_batches(list(build_estimator(plan)(iter(given)))).drop(["batch_id"])
    return comparable(found.to_pandas())


def of_the_stream(runtime: ModelRuntime, arrived: list[pd.DataFrame]) -> pd.DataFrame:
    """Return what the stream's operator gives, its corrections in the place of what they correct."""
    policy = runtime.build_event_time_policy() if runtime.spec.timed else None
    plan = StreamPlan(
        runtime.kernel, runtime.spec.unit_us, runtime.rows, runtime.state, runtime.estimates, 2,
        apply_late=runtime.spec.late == "apply", begin=runtime.begin, event_time=policy,
    )  # fmt: skip
    processor = FilterProcessor(plan) if policy is None else EventTimeProcessor(plan)
    tester = TwsTester(processor)
    labels, newest, records = make_routing(BUCKETS, 1).labels, 0, []
    for part in [*arrived, arrived[0].head(0)]:
        last = not len(part)
        newest = max(newest, int(part["at"].max().value // 1000)) if not last else newest + 10**12
        packets = pa.Table.from_batches(list(packed(plan, part, BUCKETS))).to_pandas() if not last else None
        for label in labels:
            mine = pd.DataFrame({"kind": [], "payload": []})
            if packets is not None:
                mine = packets.loc[packets["bucket"] == label, ["kind", "payload"]]
            if policy is not None:
                ends = pd.DataFrame(
                    {"kind": [int(RowPacket.MAX_EVENT_TIME)], "payload": [encode_tick(newest)]}
                )
                mine = pd.concat([mine, ends])
            elif not len(mine):
                continue
            for _, one in tester.testInPandas(label, mine.astype({"kind": int})).iterrows():
                if one["kind"] in (OutputPacket.ESTIMATES, OutputPacket.CORRECTION):
                    records.append(plan.estimates.layout.decode(bytes(one["payload"])))
                else:
                    refused = (OutputPacket.LATE, OutputPacket.BAD_STATE)
                    assert one["kind"] not in refused, OutputPacket(one["kind"])
    frame = estimate_batch(plan.estimates, join_records(records)).to_pandas()
    if runtime.spec.order.kind == "replay":
        frame = frame.drop_duplicates(["key", "event_time"], keep="last")
    return comparable(frame)


def alone(pipeline: Pipeline, rows: pd.DataFrame, smooth: bool) -> pd.DataFrame:
    """Return what the filter without Spark gives."""
    given, out = pipeline.folder / "in.parquet", pipeline.folder / "out.parquet"
    rows.to_parquet(given, index=False)
    offline.run(pipeline.settings, "walk", str(given), str(out), smooth=smooth)
    return comparable(pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time", "flag": "flags"}))


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows in an order of their own, all numbers as bytes, those that are missing alike."""

    def bits(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if value is None:
            return None
        numbers = np.atleast_1d(np.asarray(value, float))
        return None if np.isnan(numbers).all() else np.where(np.isnan(numbers), np.nan, numbers).tobytes()

    keys = frame["key"].astype(int)
    time = pd.to_datetime(frame["event_time"], utc=True).astype("int64")
    mean = frame["mean"].map(tuple)
    rest = {name: frame[name].map(bits) for name in frame.columns if name not in ("key", "id", "event_time")}
    found = pd.DataFrame({"key": keys, "time": time, "order": frame["log_likelihood"], "m": mean, **rest})
    return found.sort_values(["key", "time", "order", "m"], ignore_index=True).drop(columns=["order", "m"])


def assert_same_bits(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Check that all columns of one set of estimates have the bits that the other has."""
    assert len(found) == len(expected)
    for name in found.columns:
        left, right = found[name], expected[name]
        differ = ~((left == right) | (left.isna() & right.isna()))
        assert not differ.any(), f"{differ.sum()} of {len(found)} rows differ in {name}"


@pytest.mark.parametrize("case", CASES)
def test_history_the_stream_and_the_filter_alone_have_the_same_bits(tmp_path: Path, case: str) -> None:
    pipeline = Pipeline(tmp_path, spec_of(case))
    (pipeline.settings.models / "sideways.py").write_text(MODULE)
    runtime, rows = runtime_of(pipeline), rows_for(case)
    arrived = micro_batches(case, rows)
    assert len(arrived) > 5
    history = of_history(runtime, arrived, smooth=False)
    expected = alone(pipeline, rows, smooth=False)
    assert len(history) == len(rows)
    assert_same_bits(history, expected)
    assert_same_bits(of_the_stream(runtime, arrived), history)


@pytest.mark.parametrize("case", CASES)
def test_history_smooths_as_the_filter_alone_or_refuses(tmp_path: Path, case: str) -> None:
    pipeline = Pipeline(tmp_path, spec_of(case))
    (pipeline.settings.models / "sideways.py").write_text(MODULE)
    runtime, rows = runtime_of(pipeline), rows_for(case)
    if case in NOT_SMOOTHED:
        with pytest.raises(ModelError, match="cannot be smoothed|to smooth"):
            list_smoothed_widths(runtime.kernel)
        return
    history = of_history(runtime, micro_batches(case, rows), smooth=True)
    assert {"smoothed_mean", "smoothed_covariance"} <= set(history.columns)
    assert_same_bits(history, alone(pipeline, rows, smooth=True))
