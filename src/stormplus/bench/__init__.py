"""The benchmark: workloads, their data, and the commands that run them."""
