"""The ground floor, open to every room: errors, words, the terminal, files, processes, hardware. It knows nothing of models."""
