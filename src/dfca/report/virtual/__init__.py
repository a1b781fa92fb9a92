"""The part of a report about virtual time."""
