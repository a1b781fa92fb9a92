"""Real participants: one peer per process or task, with a transport, a worker and a disk."""
