"""What is measured: works, their data, models and memory."""
