"""The log of drivers: who drives what; launching, watching and stopping. Airflow imports it: no Spark, no NumPy."""
