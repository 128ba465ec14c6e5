"""Place the nodes of a graph on devices, optimally. Nothing in here knows of the IR, of torch or of TVM.

problem     nodes, edges, kinds of devices; what a placement costs
workload    the public JSON format of such problems
units       what must share a device, or may without loss, made one
ideals      all sets that are closed downwards: what the devices before a cut may hold
contiguous  the best contiguous split, by dynamic programming over ideals
coarsen     fewer ideals, where there are too many
bounds      what no split can be better than
anyhow      the best split of any kind, by integer programming
latency     the time of one sample alone
"""
