"""Alpa's searches beside those of the planner: drawn chains, exported problems, and what Alpa finds for them."""
