"""What goes over a link between two nodes: frames, the messages of peers, and models as files; docs/protocol.md."""
