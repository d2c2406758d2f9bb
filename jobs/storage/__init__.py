"""Object stores: their settings, their small files, and the probe that a warehouse there must pass."""
