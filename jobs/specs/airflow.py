"""The section `airflow` of a model spec: when and how the model's DAGs run."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from jobs.core.times import parse_duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Duration, SpecSection

CONTINUOUS = "@continuous"

ON_LANDING = "on-landing"
"""The schedule of a DAG that runs after each landing of measurements."""


class IngestDag(SpecSection):
    """The DAG that lands files of measurements."""

    schedule: str | None = None
    """cron expression or preset such as @daily; null: started by hand"""
    path: str | None = None
    """file, folder or glob to land; may contain templates with a run's dates"""


class ScheduledDag(SpecSection):
    """A DAG with a schedule."""

    schedule: str | None = None
    """cron expression or preset such as @daily; null: started by hand"""


class PretrainDag(ScheduledDag):
    """The DAG that learns parameters from history and filters history."""

    schedule: str | None = None
    """cron expression or preset such as @daily; on-landing: when measurements have landed; null: started by hand"""


class UpgradeDag(ScheduledDag):
    """The DAG that upgrades the stream."""

    assigned_users: list[str] = []
    """users of Airflow who may approve an upgrade; none: everybody who may edit the DAG"""
    notifiers: dict[str, dict[str, Any]] = {}
    """notifiers that are told when an approval waits: the dotted name of a class of Airflow's providers, and its
    arguments, which may contain templates with a run's names and dates
    """


class ForecastDag(ScheduledDag):
    """The DAG that forecasts from the live state."""

    future: str | None = None
    """file of future rows of a model with control or inputs; may contain templates, as `ingest.path`"""


class VerifyDag(ScheduledDag):
    """The DAG that verifies the live estimates."""

    share: str = "1%"
    """share of the keys that a run verifies; other keys each day"""

    @model_validator(mode="after")
    def _some(self) -> Self:
        try:
            value = float(self.share.removesuffix("%"))
        except ValueError:
            value = 0.0
        if not self.share.endswith("%") or not 0 < value <= 100:
            raise invalid("is not a share of the keys", "write one such as 1% or 100%", "share")
        return self


class StreamDag(SpecSection):
    """The DAG that drives the stream."""

    schedule: str | None = None
    """cron expression or preset: catch up and end; on-landing: catch up when measurements have landed; @continuous:
    never end; null: on new snapshots
    """
    trigger: Duration | None = None
    """with @continuous, time between micro-batches, such as 10s (the default)"""

    give_up_after: int | None = Field(default=10, ge=1)
    """with @continuous: after this many consecutive drivers that crashed before committing a micro-batch none is
    started until `resume`; null: no limit
    """

    @property
    def continuous(self) -> bool:
        """Return whether the stream runs continuously."""
        return self.schedule == CONTINUOUS

    @property
    def on_landing(self) -> bool:
        """Return whether the stream runs each time measurements have landed."""
        return self.schedule == ON_LANDING

    @property
    def seconds(self) -> float:
        """Return the seconds between micro-batches of a continuous stream."""
        return 10.0 if self.trigger is None else parse_duration_us(self.trigger) / 1e6

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.trigger is not None and not self.continuous:
            raise invalid(
                "is for continuous streams",
                f'write schedule: "{CONTINUOUS}", or leave it out',
                "trigger",
            )
        return self


class FollowerDag(StreamDag):
    """The DAG of a query over the estimates, which is the monitor or the skill of forecasts."""

    schedule: str | None = None
    """cron expression or preset: catch up and end; @continuous: never end; null: on new estimates"""


class Airflow(SpecSection):
    """The DAGs of the model."""

    owner: str = Field(default="kalman-pipeline", min_length=1)
    """owner shown in Airflow"""
    tags: list[str] = []
    """tags in addition to the model's name"""
    ingest: IngestDag = Field(default_factory=IngestDag)
    """the ingest DAG"""
    pretrain: PretrainDag = Field(default_factory=PretrainDag)
    """the pretrain DAG"""
    estimate: ScheduledDag = Field(default_factory=ScheduledDag)
    """the estimate DAG, which estimates history by intervals"""
    stream: StreamDag = Field(default_factory=StreamDag)
    """the stream DAG"""
    monitor: FollowerDag = Field(default_factory=FollowerDag)
    """the monitor DAG, of a model that has `monitor`"""
    skill: FollowerDag = Field(default_factory=FollowerDag)
    """the skill DAG, of a model that has `forecast`"""
    forecast: ForecastDag = Field(default_factory=ForecastDag)
    """the forecast DAG, of a model that has `forecast`"""
    export: ScheduledDag = Field(default_factory=ScheduledDag)
    """the export DAG"""
    upgrade: UpgradeDag = Field(default_factory=UpgradeDag)
    """the upgrade DAG, which notices a newer version"""
    verify: VerifyDag = Field(default_factory=VerifyDag)
    """the verify DAG, which recomputes live estimates and compares them"""
    maintain: ScheduledDag = Field(default_factory=ScheduledDag)
    """the maintain DAG, which removes what nothing needs any more"""
