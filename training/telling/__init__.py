"""What a training tells: lines in the terminal, records in the run folder."""
