"""Drive the queries that run continuously: the deferrable operator, its trigger, and the launchers of drivers."""
