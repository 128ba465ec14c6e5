"""Commands: one module for each, with its arguments and its work.

`parser` is the program: it knows all commands, their exit codes and errors. `arguments`, `types` and
`compiling.planned` are what several of them have in common. `running.grade` and `compiling.placement` are the work of
`plan` for a run, and for a placement file. The module of a command is loaded when the command is named, and the
libraries it needs when it is run. Nothing imports commands but the entry points.
"""
