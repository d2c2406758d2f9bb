"""The measured works, their data, models and memory."""
