"""How the local work of a simulation is executed."""
