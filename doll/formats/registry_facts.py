"""What a schema registry says to our log-in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegistryFacts:
    """One registry, and the subject of a stream in it.

    Attributes:
        url: of the registry.
        refusal: why it is of no use: no answer, a refused log-in, another service; "" where it answers as a registry.
        latency_s: time of one request.
        subject: that was asked for; None: none is named.
        similar: names of subjects that are like it, where there is no such subject or version.
        missing: what the registry says where there is no such subject or version; "" where there is.
        unusable: why its schema cannot be used; "" where it can.
        fields: names of the fields in that schema.
    """

    url: str
    refusal: str = ""
    latency_s: float = 0.0
    subject: str | None = None
    similar: tuple[str, ...] = ()
    missing: str = ""
    unusable: str = ""
    fields: tuple[str, ...] = ()
