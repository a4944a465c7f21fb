"""The ground that the three wings stand on: errors, flags, files, checkpoints, the machine, formatting."""
