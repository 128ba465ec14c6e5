"""Optimal placement of the nodes of a graph on devices. Nothing in here knows of the IR, of torch or of TVM.

problem     nodes, edges, kinds of devices; the cost of a placement
workload    the public JSON format of such problems
units       merges nodes that must share a device, or may without loss
ideals      all sets that are closed downwards: the candidates for what the devices before a cut hold
sweep       the dynamic programme over ideals
contiguous  the best contiguous split, by that programme
coarsen     fewer ideals, where there are too many
bounds      lower bounds on the value of any split
programme   linear and integer programmes for the solver
free        the best split of any kind, by integer programming
calls       the times at which nodes run when one sample goes through alone
latency     the placement with the least latency
latency_programme   the same by integer programming, for problems that are too large to search
joint       a room: stages with tensor and data parallel degrees, from profiles of layers
sources     weights, shapes and masks, which a sample need not wait for
"""
