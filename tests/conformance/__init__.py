"""accelerate's own tests, run on the simulated cores and held to expectations.yaml."""
