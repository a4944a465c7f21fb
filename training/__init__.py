"""The chapters of the training story, one concern each."""
