"""The memory of ranks as a plan predicts it: curves over a run, and what is at home in other spaces."""
