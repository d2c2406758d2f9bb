"""Fixed-interval and fixed-lag smoothing."""
