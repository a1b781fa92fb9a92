"""Data files: cache, downloads and the parsers of their formats."""
