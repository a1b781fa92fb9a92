"""How people operate a node: commands, status, logs, metrics, diagnosis."""
