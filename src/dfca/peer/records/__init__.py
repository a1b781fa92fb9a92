"""What a peer is told, says and asks for: plain records, and how they are stored."""
