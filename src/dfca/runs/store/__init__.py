"""Run folders: what a run leaves on the disk, written, locked, read and continued."""
