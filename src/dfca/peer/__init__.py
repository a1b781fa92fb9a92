"""The protocol of one participant, as a machine without I/O: `peer.py` is the file to read first."""
