"""Data: where it comes from (`sources`), how clients divide it (`partitions`), how clusters differ (`transforms`)."""
