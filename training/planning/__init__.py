"""What a training will take, found out before it: memory, time, the fastest settings."""
