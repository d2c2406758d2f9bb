"""The OpenLineage description of a verb's run: the tables that it reads and writes, their rows and versions.

Imported only if the provider `openlineage` is installed, which asks the operator for the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from airflow.providers.openlineage.extractors import OperatorLineage
from attrs import define
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import RunFacet, dataset_version_dataset, output_statistics_output_dataset

from kalman_dags.outcome import VerbOutcome
from kalman_dags.places import find_warehouse_root

READS = {
    "pretrain": ("measurements",),
    "estimate": ("measurements",),
    "stream": ("measurements",),
    "verify": ("measurements", "estimates"),
    "upgrade": ("measurements", "estimates"),
    "monitor": ("estimates",),
    "skill": ("estimates",),
    "forecast": ("latest",),
    "export": ("estimates",),
}
"""The tables of a model that each verb reads, by their folder in the warehouse."""

WRITES = {
    "ingest": ("measurements",),
    "estimate": ("estimates_history",),
    "stream": ("estimates",),
    "upgrade": ("estimates",),
    "monitor": ("windows", "alerts"),
    "skill": ("forecast_skill",),
    "forecast": ("forecasts",),
}

SHARED = {"pretrain": ("snapshots",), "export": ("snapshots",), "verify": ("verifications",)}
"""The tables that each verb writes and that all models share."""

VERSIONED = ("pretrain", "estimate")
"""Verbs whose report has the version of the measurements that they read; `ingest` reports the version that it wrote."""


@define
class KalmanRunFacet(RunFacet):
    """Results from the verb's report: snapshot, generation, position, rows, log-likelihood, answer, report."""

    verb: str
    model: str
    summary: str
    facts: dict[str, Any]


def build_lineage(verb: str, options: Mapping[str, Any], outcome: VerbOutcome) -> OperatorLineage:
    """Return the tables and facets of one run."""
    model, rows = str(options.get("--model", "")), outcome.data.get("rows")
    version = outcome.data.get("version")
    inputs = [
        InputDataset(
            *_split_table_name(f"{folder}/{model}"),
            facets=_build_version_facet(version) if verb in VERSIONED and folder == "measurements" else {},
        )
        for folder in READS.get(verb, ())
    ]
    if verb == "ingest" and options.get("--input"):
        inputs.append(InputDataset("file", str(options["--input"])))
    names = [f"{folder}/{model}" for folder in WRITES.get(verb, ())] + list(SHARED.get(verb, ()))
    statistics: Any = {}
    if isinstance(rows, int):
        written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=rows)
        statistics = {"outputStatistics": written}
    outputs: Any = [
        OutputDataset(
            *_split_table_name(name),
            facets=_build_version_facet(version) if verb == "ingest" else {},
            outputFacets=statistics if len(names) == 1 else {},
        )
        for name in names
    ]
    told = KalmanRunFacet(verb, model, outcome.headline or "", outcome.facts)
    return OperatorLineage(inputs=inputs, outputs=outputs, run_facets={"kalman": told})


def _split_table_name(table: str) -> tuple[str, str]:
    """Return namespace and name of a table in OpenLineage's form for files: `file` and the path, or scheme and host."""
    parts = urlsplit(find_warehouse_root())
    if not parts.scheme:
        return "file", f"{find_warehouse_root().rstrip('/')}/{table}"
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path.rstrip('/')}/{table}"


def _build_version_facet(version: Any) -> dict[str, Any]:
    facet = dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=str(version))
    return {} if version is None else {"version": facet}
