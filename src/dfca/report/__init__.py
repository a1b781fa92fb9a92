"""What is shown of a run: tables, figures, pages."""
