"""The network between hosts that are namespaces: one process that reads every packet, and writes it when it is due.

`python -m benchmarks.hosts.router FD SEED SETTINGS HOST...` makes a namespace with one TUN device for each host. It
speaks JSON lines over the socket FD: it answers `{"namespaces": {...}}` once, and then `{"counts": {...}}` to each
`{"link": {...}}`, `{"cuts": [[from, to], ...]}` or `{}`. A namespace lasts as long as this process, or one inside it.

Linux's own netem does the same where a kernel has it; this needs `root`, TUN devices and iproute2 only.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DEVICE: Final = "doll0"
MTU_BYTES: Final = 1500
# The kernel hands over and takes TCP segments of up to 64 kB, as a network card does, each with how it is to be cut:
# the windows of TCP count packets of the MTU, and this process is called once for many of them.
_OFFLOADS: Final = 0x01 | 0x02  # TUN_F_CSUM, TUN_F_TSO4
_TUN_FLAGS: Final = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_VNET_HEADER: Final = struct.Struct("=BBHHHH")  # flags, gso type, header bytes, gso bytes, checksum start and offset
_READ_BYTES: Final = 1 << 17
_READS: Final = 32  # of one device, before the others have their turn
_CONTROL_BYTES: Final = 1 << 16
# A host without work sleeps for so long at most; what is due wakes it earlier.
_IDLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """What each host's card and the way between two of them are like.

    Attributes:
        delay_s: of a packet, one way.
        bits_per_s: of a host's card, in each direction; None: as fast as the machine can.
        loss: share of the packets that do not arrive.
        queue_s: a packet is lost where it would wait for so long before a card.
    """

    delay_s: float = 0.0
    bits_per_s: float | None = None
    loss: float = 0.0
    queue_s: float = 0.5


class Switch:
    """When packets arrive. Pure.

    Args:
        seed: of the losses.

    Attributes:
        link: for all hosts.
        cuts: (from, to): nothing arrives that way.
        counts: of packets by what became of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self.link = Link()
        self.cuts: Collection[tuple[int, int]] = frozenset()
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._out_free_s: dict[int, float] = {}
        self._in_free_s: dict[int, float] = {}

    def arrival_s(self, now_s: float, source: int, sink: int, size_bytes: int, packets: int = 1) -> float | None:
        """When what host `source` sends now arrives at host `sink`; None: never.

        Args:
            packets: how many packets of the MTU these bytes are. Where one of them is lost, all are.
        """
        link = self.link
        if (source, sink) in self.cuts:
            self.counts["cut"] += packets
            return None
        if link.loss and self._random.random() >= (1.0 - link.loss) ** packets:
            self.counts["lost"] += packets
            return None
        sent_s = now_s
        if link.bits_per_s is None:
            arrival_s = now_s + link.delay_s
        else:
            took_s = 8 * size_bytes / link.bits_per_s
            sent_s = max(now_s, self._out_free_s.get(source, 0.0)) + took_s
            # A card takes in what another one sends while it is sent; behind what comes from elsewhere.
            arrival_s = max(sent_s + link.delay_s, self._in_free_s.get(sink, 0.0) + took_s)
            if arrival_s - now_s - link.delay_s > link.queue_s:
                self.counts["dropped"] += packets
                return None
            self._out_free_s[source], self._in_free_s[sink] = sent_s, arrival_s
        self.counts["passed"] += packets
        return arrival_s


def address_of(host: int) -> str:
    """IPv4 address of host number `host`, from 0."""
    return f"10.77.0.{host + 1}"


def host_of(packet: bytes) -> int | None:
    """The host that an IPv4 packet is for; None: it is something else."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x4d\x00":
        return None
    return packet[19] - 1


def enter(namespace: str | int) -> None:
    """Move this thread, and those that it starts, into a network namespace.

    Args:
        namespace: a path such as `/proc/1/ns/net`, or a descriptor.

    Raises:
        OSError: it does not exist, or this process may not.
    """
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC) if isinstance(namespace, str) else namespace
    try:
        _call("setns", descriptor, _NEW_NETWORK)
    finally:
        if isinstance(namespace, str):
            os.close(descriptor)


def _call(function: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def make_host(address: str, settings: Mapping[str, str]) -> tuple[int, int]:
    """A namespace with loopback and one device; this thread is in it afterwards.

    Args:
        settings: of `/proc/sys/net/ipv4`, for this namespace.

    Returns:
        Descriptors of the namespace and of the device.

    Raises:
        OSError: this needs root and TUN devices, or the kernel refuses a setting.
    """
    _call("unshare", _NEW_NETWORK)
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_FLAGS))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    for words in (
        "link set lo up",
        f"addr add {address}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {MTU_BYTES} txqueuelen 4000 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    for name, value in settings.items():
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
    return namespace, device


def packets_of(frame: bytes) -> int:
    """How many packets of the MTU a frame of a TUN device is: its header says how the kernel is to cut it."""
    _, gso_type, header_bytes, gso_bytes, _, _ = _VNET_HEADER.unpack_from(frame)
    if not gso_type or not gso_bytes:
        return 1
    return max(1, -(-(len(frame) - _VNET_HEADER.size - header_bytes) // gso_bytes))


class Router:
    """The loop between devices and `Switch`."""

    def __init__(self, control: socket.socket, devices: Sequence[int], switch: Switch) -> None:
        self._control = control
        self._devices = devices
        self._switch = switch
        self._due: list[tuple[float, int, int, bytes]] = []
        self._number = 0  # of packets: those that are due at the same time keep their order
        self._unread = b""

    def run(self) -> None:
        """Until the other end of the control socket is closed."""
        hosts = {descriptor: host for host, descriptor in enumerate(self._devices)}
        watched = [self._control.fileno(), *self._devices]
        while True:
            wait_s = _IDLE_S
            if self._due:
                wait_s = min(max(self._due[0][0] - time.monotonic(), 0.0), _IDLE_S)
            for descriptor in select.select(watched, (), (), wait_s)[0]:
                host = hosts.get(descriptor)
                if host is not None:
                    self._read(host, descriptor)
                elif not self._obey():
                    return
            self._deliver()

    def _read(self, source: int, device: int) -> None:
        now_s = time.monotonic()
        for _ in range(_READS):
            try:
                frame = os.read(device, _READ_BYTES)
            except BlockingIOError:
                return
            sink = host_of(frame[_VNET_HEADER.size : _VNET_HEADER.size + 20])
            if sink is None or not 0 <= sink < len(self._devices):
                continue  # the kernel's own: router solicitations, multicast
            size_bytes = len(frame) - _VNET_HEADER.size
            due_s = self._switch.arrival_s(now_s, source, sink, size_bytes, packets_of(frame))
            if due_s is not None:
                self._number += 1
                heapq.heappush(self._due, (due_s, self._number, sink, frame))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, sink, frame = heapq.heappop(self._due)
            try:
                os.write(self._devices[sink], frame)
            except OSError:
                self._switch.counts["refused"] += 1

    def _obey(self) -> bool:
        data = self._control.recv(_CONTROL_BYTES)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "link" in request:
                self._switch.link = Link(**request["link"])
            if "cuts" in request:
                self._switch.cuts = frozenset((source, sink) for source, sink in request["cuts"])
            send(self._control, {"counts": self._switch.counts})
        return bool(data)


def send(control: socket.socket, message: dict[str, Any]) -> None:
    """One message on a control socket."""
    control.sendall(json.dumps(message).encode() + b"\n")


def main(argv: Sequence[str]) -> int:
    """`FD SEED SETTINGS HOST...`, the settings of the hosts' kernel as a JSON object."""
    control, seed, settings, names = socket.socket(fileno=int(argv[0])), int(argv[1]), json.loads(argv[2]), argv[3:]
    made = [make_host(address_of(host), settings) for host in range(len(names))]
    namespaces = {name: f"/proc/{os.getpid()}/fd/{namespace}" for name, (namespace, _) in zip(names, made, strict=True)}
    send(control, {"namespaces": namespaces})
    Router(control, [device for _, device in made], Switch(seed)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
