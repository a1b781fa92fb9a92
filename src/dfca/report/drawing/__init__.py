"""Figures: colours, axes, curves, plots."""
