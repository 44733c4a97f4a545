"""A pool of host memory that many jobs stream their models from, and the cores that they take turns on."""
