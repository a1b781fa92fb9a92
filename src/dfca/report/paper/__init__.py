"""The paper's evidence: its published numbers, its figures, its lemmas."""
