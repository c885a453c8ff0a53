"""Load tests and the benchmark suite of Keylane."""
