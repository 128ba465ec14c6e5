"""The compiler's reference on the command line: passes, pipelines, operations, and completions for shells.

All of it is read from the tables themselves, so that it cannot deviate from them.
"""
