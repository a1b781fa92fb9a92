"""Experiments: what to run, running it, what is left on disk, and reading it.

load (presets, files, --set) -> config -> runner -> store (the run folder) -> report, tables, plots
"""
