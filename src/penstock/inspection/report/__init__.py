"""One self-contained HTML page about a compiled model, from operator to kernel.

    material.py    what a page is made from
    reading.py     that, of a bundle, a dump folder or an IR file, and the trace of a run
    facts.py       the facts, section by section, as plain data; sections have files of their own:
                   graph_facts, pass_facts, schedule_facts, memory_facts, kernel_facts
    page.py        the facts, styles and scripts in one file of HTML
    page/          the page itself: a template, a style sheet, and JavaScript without libraries, one file per view

What the page shows it computes from the facts; nothing in it is asked from anywhere, and it runs nothing but its own script
(a content security policy says so to the browser). Names come from models, so they are data everywhere: text nodes, never
markup. The same input gives the same bytes.
"""
