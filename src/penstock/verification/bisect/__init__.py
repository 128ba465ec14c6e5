"""`penstock verify --bisect`: where what a model computes goes wrong, from the framework it came from to the last kernel.

In: a model with the options of `compile`, a bundle, or a dump folder (sources.py). Out: the first
thing that is wrong, and a reproducer of it.

    original.py    the framework's own values against the interpreter's: is it the import?
    trial.py       modules after each pass, by halves, in the interpreter in float64: is it a pass? slopes.py judges derivatives
    values.py      of the pass that it is: the first stage, operation and tensor that differ
    kernels.py     compiled kernels of every stage against the interpreter: is it a kernel?
    allowed.py     how far numbers may be apart, and why
    shrinking.py   the smallest module that still shows a fault; edits.py has what may be tried
    reproducer.py  a folder with that module and its inputs, and `penstock verify FILE.ir`, which runs it
    search.py      the order of all this, and what is printed
"""
