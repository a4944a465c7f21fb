"""What is kept: checkpoints, their copies, and whose the folders are."""
