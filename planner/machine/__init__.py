"""What the machine is: the probe, the catalogue of cards, the benchmark, and the record they make."""
