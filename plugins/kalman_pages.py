"""Airflow's plugin: pages of the models and their reports. AIRFLOW__CORE__PLUGINS_FOLDER names this folder."""

from __future__ import annotations

from dags.kalman_dags.pages.plugin import KalmanPages

__all__ = ["KalmanPages"]
