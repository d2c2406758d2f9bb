"""Drive the queries that run continuously: the deferrable operator, its trigger, and what launches a driver."""
