"""Looking into what was compiled: facts as data, and what shows them.

    subject                 what is looked at: a bundle, an IR file or a dump folder
    finding                 a name that somebody knows -> operations of the program
    history, why, reasons   what passes did to an operation, and why it is where it is
    summary, memory, weights, kernels, kernel_timing, flow    facts of stages, ranks, variables, kernels and graphs
    traced_memory           memory of a run as its trace tells it, beside the plan, and what lay idle
    views, colours          the same as text for a terminal
    traced_memory_view      and that of traced_memory
    exports/                files for other programs: Graphviz, ONNX with stages, Chrome trace, CSV
    notebook, traces        plans and measured runs as HTML for a notebook; modules and bundles do it themselves (src/penstock/inspection/html.py)
    command                 the commands inspect and diff

Facts know nothing of how they are shown: they are frozen dataclasses, and `plain` makes JSON of any of them.
"""
