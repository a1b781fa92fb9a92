"""Text: a pretrained encoder with adapters, its tokeniser, and a task with two clusters (preset `lora`)."""
