"""From planned graphs to libraries: jobs, the processes that do them, and the cache."""
