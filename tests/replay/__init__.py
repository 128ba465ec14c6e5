"""What every pass makes of a fixed corpus of models, as hashes: a change that is meant to change nothing changes none of them."""
