"""A schedule in time: a simulation of discrete events over modelled devices and links."""
