"""One self-contained HTML page about a compiled model, from operator to kernel.

    material.py    the input of a report
    reading.py     the material of a bundle, a dump folder or an IR file, and the trace of a run
    facts.py       the facts, section by section, as plain data; sections have files of their own:
                   graph_facts, pass_facts, schedule_facts, memory_facts, kernel_facts
    page.py        the facts, styles and scripts in one file of HTML
    page/          the page itself: a template, a style sheet, and JavaScript without libraries, one file per view

The page computes its views from the facts. It loads nothing, and runs only its own script; a content security policy
tells the browser so. Names come from models, so they are data everywhere: text nodes, never markup. The same input
gives the same bytes.
"""
