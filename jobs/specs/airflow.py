"""The spec's section `airflow`: when and how a model's DAGs run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from jobs.core.times import duration_us
from jobs.specs.problems import invalid
from jobs.specs.sections import Section, check_duration

CONTINUOUS = "@continuous"


class IngestDag(Section):
    """The DAG that lands files."""

    schedule: str | None = Field(
        default=None, description="cron expression or preset such as @daily; null: by hand"
    )
    path: str | None = Field(
        default=None, description="file, folder or glob to land; Airflow's templates are allowed"
    )


class ScheduledDag(Section):
    """A DAG with a schedule."""

    schedule: str | None = Field(
        default=None, description="cron expression or preset such as @daily; null: by hand"
    )


class StreamDag(Section):
    """The DAG that drives the stream."""

    schedule: str | None = Field(
        default=None,
        description="cron expression or preset: catch up and end; @continuous: run for ever; null: on new snapshots",
    )
    trigger: str | None = Field(
        default=None, description="with @continuous, time between micro-batches, such as 10s (the default)"
    )

    give_up_after: int | None = Field(
        default=10,
        ge=1,
        description="with @continuous: so many drivers in a row that crash before they have committed a micro-batch, "
        "and none is started any more until `resume`; null: they are started for ever",
    )

    @property
    def continuous(self) -> bool:
        """Tell if the stream runs for ever."""
        return self.schedule == CONTINUOUS

    @property
    def seconds(self) -> float:
        """Return the time between micro-batches of a stream that runs for ever."""
        return 10.0 if self.trigger is None else duration_us(self.trigger) / 1e6

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.trigger is not None and not self.continuous:
            raise invalid(
                "is for streams that run for ever",
                f'write schedule: "{CONTINUOUS}", or leave it out',
                "trigger",
            )
        check_duration(self.trigger, "trigger")
        return self


class FollowerDag(StreamDag):
    """The DAG of what follows the estimates: a monitor, or the skill of forecasts."""

    schedule: str | None = Field(
        default=None,
        description="cron expression or preset: catch up and end; @continuous: run for ever; null: on new estimates",
    )


class Airflow(Section):
    """The model's DAG family."""

    owner: str = Field(default="kalman-pipeline", min_length=1, description="owner shown in Airflow")
    tags: list[str] = Field(default=[], description="tags beside the model's name")
    ingest: IngestDag = Field(default_factory=IngestDag, description="the ingest DAG")
    pretrain: ScheduledDag = Field(default_factory=ScheduledDag, description="the pretrain DAG")
    stream: StreamDag = Field(default_factory=StreamDag, description="the stream DAG")
    monitor: FollowerDag = Field(
        default_factory=FollowerDag, description="the monitor DAG, of a model that has `monitor`"
    )
    skill: FollowerDag = Field(
        default_factory=FollowerDag, description="the skill DAG, of a model that has `forecast`"
    )
    export: ScheduledDag = Field(default_factory=ScheduledDag, description="the export DAG")
    upgrade: ScheduledDag = Field(
        default_factory=ScheduledDag, description="the upgrade DAG, which notices a newer version"
    )
    maintain: ScheduledDag = Field(
        default_factory=ScheduledDag, description="the maintain DAG, which takes away what nothing needs"
    )
