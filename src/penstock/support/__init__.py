"""The common base of all packages: errors, words, the terminal, files, processes, hardware.

It knows nothing of models.
"""
