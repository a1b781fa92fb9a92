"""What a node keeps on its disk."""
