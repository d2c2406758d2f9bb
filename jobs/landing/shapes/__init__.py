"""The shapes of files that other programs write: headers, encodings, wide tables, JSON over several lines."""
