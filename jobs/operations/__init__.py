"""Maintenance and status: the retention plan, deleting by it, the status of every model, and alarms."""
