"""Delta logs, Parquet files, small files, positions and checkpoints in folders and object stores, without a JVM."""
