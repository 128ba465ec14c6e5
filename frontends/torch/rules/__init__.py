"""Rules for ATen operations, a file per family: the operations of the IR that a call becomes."""
