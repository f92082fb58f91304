"""What all processes share: probes, heartbeats, signals, atomic files, metric names, memory settings, fault points."""
