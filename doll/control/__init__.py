"""Control links: grants and pushes between the parameter server and a worker, beside Kafka (ADR 0026).

A link carries Grant and NewVersion to the worker, Push and Nack to the server. It may break at any time and lose what
is on its way; both ends notice that, and send again through Kafka what is not answered. Nothing here decides what is
applied: sessions, terms and the engine's counters do, as with Kafka.

`link_state` has what both ends share: numbered frames, heartbeats, refusals. `local_socket` is a Unix socket,
`redis_streams` a pair of streams in Redis.
"""
