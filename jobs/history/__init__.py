"""The estimates of every row of a table, in batch on Spark: what is read, from which state, and how it is committed."""
