"""Random worlds full of faults, on tiny models: is every peer safe in them, and alive once the faults have stopped?

A world is drawn from its number: a graph, an algorithm, speeds, delays, loss, duplication, corruption, reordering,
partitions, crashes before and after a save with and without the bank, restarts from an old save, late joiners, a clock
that jumps, a graph that changes, a peer that sends garbage or lies about its lineage.
The peers are real; what they train is not: the loss of
a model theta on a sample x is |theta - x|^2, so that a world takes milliseconds. Checked in every world:

  safety     nothing that is folded is of another lineage, size or type; no NaN enters a bank; memory stays bounded; no
             exception leaves a peer
  liveness   once faults stop, the peers of a connected part agree on one lineage, all hold its models, and rounds go on
  resume     a peer that is replaced by a copy of its saved state at any moment changes nothing
  replay     the inputs of a peer, driven again, give the same bits

A world that fails is printed as one line that repeats it; `shrink` takes away what is not needed for the failure.
"""
