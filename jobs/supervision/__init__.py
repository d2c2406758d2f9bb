"""Launch, watch and stop drivers: their log, progress, lag, metrics and profiles. Airflow parses some files of it."""
