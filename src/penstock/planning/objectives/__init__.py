"""Plans for inference that are chosen for an objective: the time of one microbatch alone, or the pace of many."""
