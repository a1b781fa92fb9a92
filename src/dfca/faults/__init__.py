"""Random worlds full of faults, on tiny models: is every peer safe in them, and alive once the faults have stopped?

A world is drawn from its number: a graph, an algorithm, speeds, delays, loss, duplication, corruption, reordering,
partitions, crashes around a save or an election with and without the bank, restarts from an old save, late joiners,
clocks that jump, a graph that changes, peers that send garbage or lie about their lineage. Harsh worlds also have loss
in one direction, links that flap, slow saves, clocks of other rates, robust folds and more of everything. The peers are
real; what they train is not: the loss of a model theta on a sample x is |theta - x|^2, so that a world takes
milliseconds. Checked in every world:

  safety     nothing that is folded is broken or of another lineage, size or type; no NaN enters a bank; memory stays
             bounded; no exception leaves a peer
  liveness   once faults stop, the peers of a connected part agree on one lineage and all hold its models, within the
             time that the kinds of faults allow; they stay so, do rounds, and fold models of every neighbour
  resume     a peer that is replaced by a copy of its saved state at any moment changes nothing
  replay     the inputs of a peer, driven again, give the same bits

A world that fails is printed as one line that repeats it; `shrink` takes away what is not needed for the failure.
"""
