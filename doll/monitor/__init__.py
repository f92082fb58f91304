"""The state of a job from its records, and views of this state.

Pure: `history` and `progress` (state of a run), `prequential` and `rates` (its numbers), `heartbeats` (silent roles),
`run_report` and `text` (for users), `calibration`, and `page` and `panels` (content that browsers draw). With side
effects: `display` (terminal), `csv_file`, `folder_logs`, `prometheus` (HTTP).
"""
