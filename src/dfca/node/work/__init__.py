"""How a node does the work that its peer asks for."""
