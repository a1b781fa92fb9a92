"""What people do with a node that runs, or does not: commands to it, its state, its logs and metrics, its ailments."""
