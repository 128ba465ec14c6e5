"""Tables that a search over sets of devices looks things up in."""
