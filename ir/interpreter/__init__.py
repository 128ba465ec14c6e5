"""The meaning of graphs and schedules, in NumPy: the judge of every pass and every back end."""
