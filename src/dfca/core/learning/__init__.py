"""Models as flat vectors, their losses and local steps."""
