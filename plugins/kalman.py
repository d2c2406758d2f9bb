"""Airflow's plugin of this project: pages of the models and their reports. AIRFLOW__CORE__PLUGINS_FOLDER names its folder."""

from __future__ import annotations

from dags.kalman_dags.pages.plugin import KalmanPages

__all__ = ["KalmanPages"]
