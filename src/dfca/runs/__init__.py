"""Running trials, what they leave on disk, and continuing them."""
