"""Models behind the workload door."""
