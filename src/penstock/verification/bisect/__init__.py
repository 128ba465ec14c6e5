"""The search for the place where results of a model go wrong, from its framework to the last kernel.

In: a model with the options of `compile`, a bundle, or a dump folder (sources.py). Out: the first thing that is wrong,
and a reproducer of it.

    original.py    the framework's values against the interpreter's: a wrong import
    trial.py       modules after each pass, by halves, in the interpreter in float64: a wrong pass; slopes.py judges
                   derivatives
    values.py      the first stage, operation and tensor that differ after that pass
    kernels.py     compiled kernels of every stage against the interpreter: a wrong kernel
    shrinking.py   the smallest module that still shows a fault; edits.py has the edits that are tried
    reproducer.py  a folder with that module and its inputs, and `penstock verify FILE.ir`, which runs it
    search.py      the order of all this, and the output

Tolerances are in penstock.verification.tolerance.
"""
