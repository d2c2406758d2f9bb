"""The status of models, advice and alarms, the pages on health and on comparisons, and maintenance."""
