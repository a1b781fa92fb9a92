"""Many real nodes on one machine, from an experiment: `dfca swarm`."""
