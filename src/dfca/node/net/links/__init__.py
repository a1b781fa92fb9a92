"""One link with one neighbour: dialled, accepted, watched, written to."""
