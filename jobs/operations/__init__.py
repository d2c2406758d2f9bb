"""Maintenance and status: what may be deleted, deleting it, the status of every model, alarms."""
