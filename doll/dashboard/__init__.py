"""The live page of a job: a read-only web page that shows the state from `doll.monitor`, with server-sent events."""
