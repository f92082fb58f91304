"""The live page of a job: a read-only web page over `doll.monitor`, with server-sent events."""
