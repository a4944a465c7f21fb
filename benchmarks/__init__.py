"""What measures this project and its peers; results with their commands lie in docs/benchmarks/."""
