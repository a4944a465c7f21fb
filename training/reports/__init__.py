"""The output of a training: lines in the terminal, records in the run folder."""
