"""What every process of DOLL has: probes, signals, memory settings, fault points."""
