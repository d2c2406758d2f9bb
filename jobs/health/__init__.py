"""How a model has been doing: its health over time from its tables, as one page. No Spark."""
