"""Values that travel between stages with unlike meshes: in which layouts, and what both stages do for it."""
