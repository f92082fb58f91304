"""What is known about a job, by its records.

Pure: `history` and `progress` (the state of a run), `prequential` and `rates` (its numbers), `heartbeats`
(which roles are silent), `job_metrics` (for Prometheus), `run_report` and `text` (for people),
`calibration` and `spot_history`. With effects: `display` (terminal), `plots`, `plan_plot` and
`spot_plot` (PNG), `csv_file`, `prometheus` (HTTP).
"""
