"""The pure core: torch and the standard library; no I/O, clock, log or global randomness."""
