"""The synchronous simulator: all clients of a round at once, in closed forms."""
