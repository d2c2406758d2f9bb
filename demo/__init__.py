"""The demo: a year of flights through the whole pipeline, killed on the way, then checked (docs/demo.md)."""
