"""Pages in Airflow's API server: for each model its DAGs, tables, reports and commands; the reports."""
