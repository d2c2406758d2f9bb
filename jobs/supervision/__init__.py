"""The log of drivers; launch, watch and stop drivers. Airflow imports this room: no Spark, no NumPy."""
