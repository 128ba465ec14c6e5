"""Commands: one module for each, with its arguments and what it does.

`parser` is the program: it knows all commands, their exit codes and errors. `arguments`, `types` and `planned` are what several of them have in
common; `grade` and `placement` are what `plan` does where it is about a run, or about a placement file. A command is loaded when it is named, and
what it does when it is run. Nothing imports commands but the entry points.
"""
