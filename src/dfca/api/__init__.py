"""What Python users call: `simulate`, `load_run`, and what these return. `dfca` has all of their names."""
