"""Place the nodes of a graph on devices, optimally. Nothing in here knows of the IR, of torch or of TVM.

problem     nodes, edges, kinds of devices; what a placement costs
workload    the public JSON format of such problems
units       what must share a device, or may without loss, made one
ideals      all sets that are closed downwards: what the devices before a cut may hold
sweep       the dynamic programme over ideals
contiguous  the best contiguous split, by that programme
coarsen     fewer ideals, where there are too many
bounds      what no split can be better than
programme   linear and integer programmes for the solver
free        the best split of any kind, by integer programming
calls       when nodes run where one sample goes through alone
latency     the placement for which that takes least
latency_programme   the same by integer programming, for what is too large to search
sources     weights, shapes and masks, which a sample need not wait for
"""
