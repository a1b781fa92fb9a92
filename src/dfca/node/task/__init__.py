"""What a node learns: the facts of its swarm, its own settings, its data, its model."""
