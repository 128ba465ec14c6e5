"""The dump folder of `--dump-ir DIR`: the output of every pass and every step of a compile, without weights.

    00_input.ir, NN_pass.ir  the module before the first pass, and after each pass that changed something: parses,
                             verifies, prints back byte for byte
    NN_pass.diff             with --dump-ir-changed, in place of modules but the first: the changes the pass made, by
                             name (penstock.inspection.diff)
    passes.tsv               a row for each pass: number, pass, ms, ops before and after, whether it changed anything,
                             the rest of the pipeline
    events.jsonl             a line for each pass and each step of compiling, as it ends: event (pass or step), name,
                             start (seconds since the dump began), ms, said (list of lines); of a pass also number,
                             call, ops_before, ops_after, changed, file (or null), rest
    repro.ir                 where a pass failed: the module before it; its first line is the command that fails
    plan.json                the plan, as in the bundle
    index.html               all of it for a browser, in one file (penstock.inspection.report); whole modules, whatever
                             is left out elsewhere
    schedule.svg             the run that the simulator predicts: actions and live bytes of every rank over time
    stages/sN/module.ir      the graphs of a stage with their variables, a module of its own
    stages/sN/relax.py       of compiled stages: the function of every graph, which calls kernels
    stages/sN/kernels.tsv    the calls of kernels in order: graph, kernel (the attribute of operations), file,
                             operations
    stages/sN/kernels/*.py   the TIR of every kernel; equal ones are one
    stages/sN/kernels.cu     of stages on GPUs: the input of nvcc
    ranks/rN/module.ir       the stage of a rank, with the actions of that rank alone
    ranks/rN/actions.tsv     its actions in order: when (start: once; batch: for each), action, what it does
    dump-files.txt           the names of all of these: the next dump into the folder removes them

Modules can be compiled further (`penstock opt NN_pass.ir -p PASS`), compared (`penstock diff`) and inspected (`penstock
inspect`). With `--dump-ir-filter REGEX` only operations are dumped whose line `FILE @GRAPH OPERATION` matches. FILE is
the path in the folder without its ending: `_fuse @` for a pass, `@s0[.]F ` for a graph, `= matmul` for operations. The
filtered module is still a module (parts.py).

    folder.py   the Dump, which records passes and steps
    parts.py    modules of parts of a module
    files.py    the files of a dump, and how they are told from others in its folder
    program.py  the files of a planned module: parts, actions, picture

The reader of such a folder is penstock.inspection.dump_reading.
"""

from .folder import Dump, step_of

__all__ = ["Dump", "step_of"]
