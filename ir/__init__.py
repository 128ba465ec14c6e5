"""The intermediate representation: data structures, op table, text form, verifier and NumPy meaning."""
