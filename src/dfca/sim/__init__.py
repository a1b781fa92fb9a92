"""Simulators: what both share lives here; `rounds` is the synchronous one, `events` the one in virtual time."""
