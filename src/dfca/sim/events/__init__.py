"""The simulator in virtual time: a clock, links, faults and clients that come and go."""
