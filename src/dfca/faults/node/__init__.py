"""Whole nodes in a simulated world: `dfca faults --layer node`.

`Service`, `Node`, the network's logic and the store are those of real nodes. Clock, disk, threads and wire are
simulated (`node.surroundings`, `node.net.links.wire`), and so is training. All nodes of a world share one
event loop with a virtual clock, so that a world takes a second and every run of it is the same.

  safety     no exception leaves a node, no model is broken, a start restores what the disk has promised to keep, and no
             incarnation is used twice
  liveness   once faults stop, all members are linked, agree on one lineage, and do their rounds
  honesty    a disk that refuses a save is named in the log; a node ends for a reason that it says, and in time
"""
