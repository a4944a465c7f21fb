"""What the numbers are computed on: device, precision, processes, compiled code."""
