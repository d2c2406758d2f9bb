"""The pipeline's commands and the modules they share; each verb is one module."""
