"""What is known about a job, by its records.

Pure: `history` and `progress` (the state of a run), `prequential` and `rates` (its numbers), `heartbeats`
(which roles are silent), `job_metrics` (for Prometheus), `run_report` and `text` (for people),
`calibration` and `spot_history`. `page` and `panels` are what browsers draw. With effects: `display`
(terminal), `csv_file`, `prometheus` (HTTP).
"""
