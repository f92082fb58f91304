"""What is known of a job: folds of its records, one subject per module. A page or an exporter would read these."""
