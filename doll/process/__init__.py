"""The common parts of processes: probes, heartbeats, signals, files, metric names, memory settings, fault points."""
