"""Experiments: what to run (`config`), running it (`runner`), what is left on disk (`store`), and reading it (`report`)."""
