"""Read and check model specs, without NumPy or Spark; each mistake is reported with its line and a remedy."""
