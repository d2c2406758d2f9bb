"""The pages that Airflow's API server shows: a model with its DAGs, tables, reports and commands; the reports."""
