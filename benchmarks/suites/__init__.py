"""One question a file, each `python -m benchmarks.suites.NAME`."""
