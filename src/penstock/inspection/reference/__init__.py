"""What the compiler has, told on the command line: passes and pipelines, operations and who supports them, and completions for shells.

All of it is read from the tables themselves, so that it cannot say anything else than what is done.
"""
