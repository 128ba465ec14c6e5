"""Pure functions from module to module, the table that names them, and the pipelines they stand in."""
