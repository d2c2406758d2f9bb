"""Read files in the forms that other programs write, such as wide tables and JSON over several lines."""
