"""Rejected rows in quarantine: shown, summarised, exported, discarded, checked again and replayed."""
