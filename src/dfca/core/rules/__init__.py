"""The mathematics of every decision, each written once."""
