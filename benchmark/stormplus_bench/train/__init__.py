"""What is trained, by whom and how: workloads, steppers, one run."""
