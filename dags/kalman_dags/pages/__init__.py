"""Pages in Airflow's API server: the DAGs, tables, reports and commands of each model."""
