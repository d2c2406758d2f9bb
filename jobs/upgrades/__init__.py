"""Replace the live generation by another version or layout: upgrade, repartition, migrate."""
