"""What measures this project beside its peers. For developers."""
