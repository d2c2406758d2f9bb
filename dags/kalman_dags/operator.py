"""The operator that runs a verb of the pipeline as a Spark application."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperatorLink, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from jobs.core.errors import ALREADY_RUNNING, INPUT_ERROR, UserError
from jobs.core.report import REPORT_FILE
from jobs.spark.conf import build_spark_conf
from jobs.spark.jars import fetch_optional_jars, list_jars, store_jars
from jobs.storage.object_files import build_store_conf
from kalman_dags.asset_events import tell
from kalman_dags.dag_defaults import LONGEST
from kalman_dags.outcome import VerbOutcome, read_outcome
from kalman_dags.places import find_warehouse_root
from kalman_dags.submit import (
    CONNECTION,
    KalmanHook,
    build_spark_environment,
    find_application,
    find_package_folder,
)

_UNFIT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that no value may contain: control characters and surrogates."""


class ReportLink(BaseOperatorLink):
    """The button *Report* of a task whose verb has written a report page."""

    name = "Report"  # pyright: ignore[reportAssignmentType]

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the path of the report; the empty text, which shows no button, if the verb has written none."""
        return operator.outcome.facts.get("page", "")


class KalmanOperator(SparkSubmitOperator):
    """Operator that runs `kalman-pipeline VERB` as a Spark application and interprets its exit codes.

    Args:
        verb: the verb to run; its application is `jobs/<verb>.py`.
        options: the value (a template) of each option; an option is left out if its value renders to an empty text.
        flags: options without a value (templates); empty texts are left out.
        finish_on_kill: when the task is killed, let the driver finish its work, such as a stream's micro-batch, instead
            of killing the whole process tree.
        returned: prefixes of report lines. If it is not empty, the task returns the report as XCom, `{"lines": [...],
            "data": {...}}`. For a driver in a cluster the data are empty, and the lines are the output lines with one
            of these prefixes.
        refusals: the words of errors that no retry can avoid, with the remedy in Airflow; after such an error the task
            fails at once.
        too_early: the words of errors that only mean that the task's input is not ready yet; the task is then skipped.
        wait_for_other: the task succeeds if another driver holds the stream, because this driver does the task's work.
        needs: templates, at least one of which must render to a text, and the error sentence if none does; the check
            comes before Spark starts.
        kafka: whether to add Spark's connector for Kafka (`ModelSpec.speaks_to_kafka`); it is fetched if missing.

    Exit code 2 (bad input) fails the task at once, because no retry can succeed. Exit code 3 (another driver has the
    stream, or there is nothing to do) skips the task. On a retry, however, the other driver may be this task's lost
    driver, whose lease has not expired. Then the task is retried, and only the last try skips it.
    """

    template_fields = (*SparkSubmitOperator.template_fields, "options", "flags", "needed")
    ui_color = "#e8f1fb"
    operator_extra_links = (ReportLink(),)

    def __init__(
        self,
        *,
        verb: str,
        options: Mapping[str, str | None],
        flags: Sequence[str] = (),
        finish_on_kill: bool = False,
        returned: Sequence[str] = (),
        refusals: Mapping[str, str] | None = None,
        too_early: Sequence[str] = (),
        wait_for_other: bool = False,
        needs: tuple[str, str] | None = None,
        kafka: bool = False,
        conf: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        ui = {"spark.ui.enabled": os.environ.get("KALMAN_SPARK_UI", "false")}
        # A durable task keeps its job id after a clear, so it would return without another run.
        kwargs.setdefault("durable", False)
        super().__init__(
            application=find_application(verb),
            conf={**ui, **(conf or {})},
            env_vars=build_spark_environment(),
            spark_binary=str(find_package_folder("pyspark") / "bin" / "spark-submit"),
            conn_id=CONNECTION,
            name=f"kalman-{verb}",
            **kwargs,
        )
        self.verb = verb
        self.options = dict(options)
        self.flags = list(flags)
        self.finish_on_kill = finish_on_kill
        self.returned = tuple(returned)
        self.refusals, self.too_early = dict(refusals or {}), tuple(too_early)
        self.wait_for_other = wait_for_other
        self.needed, self.unless = needs or ("given", "")
        self.kafka = kafka
        self.outcome = VerbOutcome([], {})
        self._hook: KalmanHook | None = None

    def execute(self, context: Context) -> dict[str, Any] | None:
        """Run the verb; its output goes to the task's log, whose last line states the outcome."""
        if not str(self.needed).strip():
            raise AirflowFailException(self.unless)
        self.application_args = self.words()
        with tempfile.TemporaryDirectory(prefix="kalman-") as folder:
            file = Path(folder) / "report.json"
            self.env_vars = {**(self.env_vars or {}), REPORT_FILE: str(file)}
            try:
                if not KalmanHook.is_local():
                    root = find_warehouse_root()
                    self.conf = {**build_spark_conf(), **build_store_conf(root), **(self.conf or {})}
                    kafka = fetch_optional_jars("kafka") if self.kafka else []
                    self.jars = ",".join([*list_jars(), *kafka, *store_jars(root)])
                super().execute(context)
            except UserError as error:
                raise AirflowFailException(error.message) from None
            except AirflowException as error:
                self._explain(error, context)
            seen = self._hook.lines(self.returned) if self._hook and self.returned else []
            self.outcome = read_outcome(file, seen)
        tell(context, self.outlets, self.outcome)
        if self.outcome.headline:
            self.log.info("%s: %s", self.task_id, self.outcome.headline)
        return self.outcome._asdict() if self.returned and self.outcome.lines else None

    def _explain(self, error: AirflowException, context: Context) -> None:
        """Raise the exception for the driver's exit code; return if another driver does the work."""
        code = self._hook.exit_code if self._hook else None
        said = self._hook.errors if self._hook else ""
        # The errors below are one sentence, while the provider's error repeats the log.
        if any(words in said for words in self.too_early):
            raise AirflowSkipException(f"too early: {said}") from None
        if code == INPUT_ERROR:
            raise AirflowFailException(f"{self.verb} refused its input: {said or 'see the log'}") from None
        if code == ALREADY_RUNNING and self.wait_for_other:
            self.log.info("Another driver does this task's work: %s", said)
            return
        ti: Any = context.get("ti")
        # On a retry the other driver may be the one of this task's lost try.
        if code == ALREADY_RUNNING and not 1 < ti.try_number <= ti.max_tries:
            raise AirflowSkipException(f"not for this run: {said or 'see the log'}") from None
        for words, remedy in self.refusals.items():
            if words in said:
                raise AirflowFailException(f"{said}. {remedy}") from None
        if said:
            raise AirflowException(f"{self.verb} ended with exit code {code}: {said}") from None
        raise error

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return the tables that the verb has read and written, and its report, for OpenLineage."""
        from kalman_dags.lineage_facets import build_lineage

        return build_lineage(self.verb, self.options, self.outcome)

    def words(self) -> list[str]:
        """Return the verb's options, rendered. Option and value form one word, so that no value can be an option.

        Raises:
            AirflowFailException: a value cannot be an argument of a program.
        """
        given = {option: str(value) for option, value in self.options.items() if value not in (None, "")}
        for option, value in given.items():
            if _UNFIT.search(value) or len(value) > LONGEST:
                raise AirflowFailException(
                    f"{option} of {self.verb} cannot be {value[:40]!r}: a value has no control characters, and at most "
                    f"{LONGEST:,} others"
                )
        return [*(f"{option}={value}" for option, value in given.items()), *filter(None, self.flags)]

    def on_kill(self) -> None:
        """Stop the driver: by SIGTERM if it may finish its work, or else as the provider does."""
        if self.finish_on_kill and self._hook is not None and self._hook.stop_driver(self.application):
            self.log.info("Asked the driver to stop; it finishes its micro-batch and ends by itself.")
            return
        super().on_kill()

    def _get_hook(self) -> KalmanHook:
        return KalmanHook(
            own_session=self.finish_on_kill,
            conn_id=self._conn_id,
            conf=self.conf,
            jars=self.jars,
            name=self.name,
            application_args=self.application_args,
            env_vars=self.env_vars,
            spark_binary=self._spark_binary,
        )
