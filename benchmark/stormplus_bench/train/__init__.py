"""Workloads, methods, and one run of a method on a workload."""
