"""Models on their way: announced, read in chunks, resumed."""
