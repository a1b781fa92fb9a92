"""Waves over a spanning tree: elections and surveys. Read `wave` first."""
