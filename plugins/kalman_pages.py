"""The entry point of the Airflow plugin with the pages of models and reports.

The setting AIRFLOW__CORE__PLUGINS_FOLDER names this folder.
"""

from __future__ import annotations

from dags.kalman_dags.pages.plugin import KalmanPages

__all__ = ["KalmanPages"]
