"""What to run: a preset or a TOML file becomes checked trials. `load` -> `config`, `sweep`, `world`."""
