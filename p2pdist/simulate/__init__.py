"""The simulator: the cores of hosts and tracker on a virtual clock, with a network model, seeded
faults and checked invariants."""
