"""The log of drivers: who drives what; launching, watching and stopping. Airflow imports it, so no Spark and no NumPy."""
