"""`doll join`: joins a topic of features and topics of labels into the samples topic, each record exactly once.

`extract` reads key, event time and label of a record. `doll.records.join_log` is the format of the join log, which
contains the records of all topics by key. `matcher` (pure) joins the records of one partition of the log. `entries`
stores its open keys. `main` is the process.
"""
