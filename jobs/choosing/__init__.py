"""Choose a model for data: find the columns' roles, rank structures by their predictions, write the spec."""
