"""What every layer may use: errors, files, imports, memory, validation."""
