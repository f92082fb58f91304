"""The state of a job by its records, and views of it.

Pure: `history` and `progress` (the state of a run), `prequential` and `rates` (its numbers), `heartbeats` (which roles
are silent), `run_report` and `text` (for people), `calibration`. `page` and `panels` are what browsers draw. With
effects: `display` (terminal), `csv_file`, `folder_logs`, `prometheus` (HTTP).
"""
