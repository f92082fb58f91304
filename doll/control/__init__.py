"""Control links: direct connections between server and worker, for grants and pushes, in addition to Kafka (ADR 0026).

A link carries Grant and NewVersion to the worker, and Push and Nack to the server. A link may break at any time and
lose records. Both ends notice the loss, and send unanswered records again through Kafka. Which gradients are applied
does not depend on links: sessions, terms and the engine's counters decide, as with Kafka.

`link_state` contains the common part of both ends: numbered frames, heartbeats, refusals. `local_socket` uses a Unix
socket, `redis_streams` a pair of streams in Redis.
"""
