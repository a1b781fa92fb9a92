"""Whole nodes in a simulated world: `dfca faults --layer node`.

`Service`, `Node`, the network's logic, pairing and the store are those of real nodes. Clock, disk, threads, wire and
the door of pairing are simulated (`node.surroundings`, `node.net.links.wire`, `node.trust.handshake`), and training.
All nodes of a world share one event loop with a virtual clock, so that a world takes a second and every run of it is
the same.

  safety     no exception leaves a node, no model is broken, a start restores what the disk has promised to keep, and no
             incarnation is used twice
  liveness   once faults stop, all members are linked, agree on one lineage, and do their rounds
  pairing    a device joins by an invite over the network with its faults, by no wrong secret; both ends show one code;
             all members know it in the end, and it and they fold each other's models
  honesty    a disk that refuses a save is named in the log; a node ends for a reason that it says, and in time
"""
