"""Teams of devices that split tensors, as the planner of `--batch` takes them: each for one device."""
