"""Facts about a compiled program, and the views and files that show them.

    subject                 the bundle, IR file or dump folder that is inspected
    plan_reading, dump_reading    the plan of a bundle or dump, and the modules of a dump's passes
    finding                 a name that a user gives -> operations of the program
    history, why, reasons   the changes passes made to an operation, and the reasons for its place
    summary, memory, weights, kernels/, flow    facts of stages, ranks, variables, kernels and graphs
    traces/                 measured runs: their actions, and their memory beside the plan's
    views/                  facts as text for a terminal, as pictures and as plain data
    report/                 the page index.html of a dump folder
    dump/                   the folder of --dump-ir
    exports/                files for other programs: Graphviz, ONNX with stages, Chrome trace, CSV
    reference/              the commands passes, ops and completion
    html, notebook          modules, bundles, plans and measured runs as HTML for a notebook
    command, diff           the commands inspect and diff

Facts are frozen dataclasses that know nothing of how they are shown; `plain` makes JSON of any of them.
"""
