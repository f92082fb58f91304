"""HetPipe's two models and its cluster: VGG-19 and ResNet-152 layer by layer, four kinds of GPUs, the links.

FLOPs, parameters and activations follow from the shapes of the architectures (Simonyan and Zisserman 2015, model E; He
et al. 2016, table 1), for images of 224 x 224 in 32-bit floats. A multiplication and an addition are two FLOPs, and the
backward pass has twice those of the forward pass. Times are FLOPs by the speed of the GPU.

What the paper does not give, and where it is from here:

- FLOP/s of a TITAN V in each model: from the paper's Table 4, the throughput of four of them (4[V], HetPipe).
- Speed of the other GPUs: Table 4, ResNet-152 by Horovod, where the slowest GPU sets the pace (233 images/s of 4 V,
  353 of 4 V and 4 R, 415 of 4 V, 4 R and 4 Q). That of G lies between those of R and Q, as the paper says.
- Bytes/s of PCIe and InfiniBand: 3/4 of the peak.
- Memory: half a GiB of each GPU is for the driver, the libraries and the workspaces of convolutions.
"""

from __future__ import annotations

from doll.pipeline.profiling.profile import Device, LayerProfile, Profile

from doll_lab.pipelines.network import Network

BATCH_SIZE = 32
IMAGE = (3, 224, 224)
FLOAT_BYTES = 4
GIB = 2.0**30
RESERVED_BYTES = 0.5 * GIB
FLOP_PER_IMAGE_TO_TRAIN = {"VGG-19": 3 * 39.3e9, "ResNet-152": 3 * 22.6e9}
V_IMAGES_PER_S = {"VGG-19": 300 / 4, "ResNet-152": 256 / 4}
V_FLOP_PER_S = {model: flop * V_IMAGES_PER_S[model] for model, flop in FLOP_PER_IMAGE_TO_TRAIN.items()}

# One kind of GPU for each node, four of each.
GPUS = {
    "V": Device("TITAN V", speed=1.0, memory_bytes=12 * GIB - RESERVED_BYTES, node="V"),
    "R": Device("TITAN RTX", speed=(353 / 8) / (233 / 4), memory_bytes=24 * GIB - RESERVED_BYTES, node="R"),
    "G": Device("GeForce RTX 2060", speed=0.65, memory_bytes=6 * GIB - RESERVED_BYTES, node="G"),
    "Q": Device("Quadro P4000", speed=(415 / 12) / (233 / 4), memory_bytes=8 * GIB - RESERVED_BYTES, node="Q"),
}
NETWORK = Network(within_node_bytes_per_s=0.75 * 15.75e9, between_nodes_bytes_per_s=0.75 * 56e9 / 8)
# Arrays of the weights' size besides them: the gradient, and the sum of a wave's steps.
OPTIMIZER_MULTIPLIER = 2.0
KINDS = ("VVVV", "RRRR", "GGGG", "QQQQ", "VRGQ", "VVQQ", "RRGG")
"""Virtual workers of the paper's Table 3."""


def virtual_worker(kinds: str) -> tuple[Device, ...]:
    """The GPUs of one virtual worker, each of its kind's node.

    >>> [device.name for device in virtual_worker("VQ")]
    ['TITAN V', 'Quadro P4000']
    """
    return tuple(GPUS[kind] for kind in kinds)


class _Layers:
    """Layers in order, from the shape of the input on; `shape` is channels, height, width."""

    def __init__(self, model: str, batch_size: int) -> None:
        self.model = model
        self.batch_size = batch_size
        self.shape = IMAGE
        self.layers: list[LayerProfile] = []
        self._begin()

    def _begin(self) -> None:
        self._flop, self._parameters, self._kept = 0, 0, 0

    def conv(self, channels: int, size: int, stride: int = 1, *, bias: bool, kept: int) -> None:
        """A convolution that keeps height and width except for its stride; `kept`: arrays of its output's size that the
        backward pass needs."""
        before, height, width = self.shape
        height, width = -(-height // stride), -(-width // stride)
        weights = before * channels * size * size
        self.shape = (channels, height, width)
        self._flop += 2 * weights * height * width
        # With a bias, or with the scale and the shift of a normalization.
        self._parameters += weights + (channels if bias else 2 * channels)
        self._kept += kept * channels * height * width

    def pool(self, stride: int) -> None:
        channels, height, width = self.shape
        self.shape = (channels, height // stride, width // stride)
        self._kept += channels * self.shape[1] * self.shape[2]

    def full(self, outputs: int) -> None:
        channels, height, width = self.shape
        inputs = channels * height * width
        self.shape = (outputs, 1, 1)
        self._flop += 2 * inputs * outputs
        self._parameters += inputs * outputs + outputs
        self._kept += outputs

    def end(self, name: str) -> None:
        """What came since the last call is one layer."""
        channels, height, width = self.shape
        floats = FLOAT_BYTES * self.batch_size
        forward_s = self.batch_size * self._flop / V_FLOP_PER_S[self.model]
        self.layers.append(
            LayerProfile(
                name, forward_s=forward_s, backward_s=2 * forward_s, activation_bytes=floats * self._kept,
                output_bytes=floats * channels * height * width, parameter_bytes=FLOAT_BYTES * self._parameters,
            )
        )  # fmt: skip
        self._begin()

    def profile(self) -> Profile:
        channels, height, width = IMAGE
        return Profile(
            model=self.model, batch_size=self.batch_size, device=GPUS["V"].name, layers=tuple(self.layers),
            input_bytes=FLOAT_BYTES * self.batch_size * channels * height * width,
        )  # fmt: skip


def vgg19(batch_size: int = BATCH_SIZE) -> Profile:
    """19 layers: 16 convolutions (with the pooling behind them, if any) and 3 full layers."""
    layers = _Layers("VGG-19", batch_size)
    for block, (count, channels) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), 1):
        for number in range(1, count + 1):
            layers.conv(channels, 3, bias=True, kept=1)
            if number == count:
                layers.pool(2)
            layers.end(f"conv{block}_{number}")
    for number, outputs in enumerate((4096, 4096, 1000), 6):
        layers.full(outputs)
        layers.end(f"fc{number}")
    return layers.profile()


def resnet152(batch_size: int = BATCH_SIZE) -> Profile:
    """52 layers: the first convolution, 50 blocks of three convolutions each, and the full layer.

    A block is not cut: its shortcut would have to be sent too. Each convolution keeps its output, for the normalization
    behind it, and that of the activation.
    """
    layers = _Layers("ResNet-152", batch_size)
    layers.conv(64, 7, 2, bias=False, kept=2)
    layers.pool(2)
    layers.end("conv1")
    for stage, (count, channels) in enumerate(((3, 64), (8, 128), (36, 256), (3, 512)), 2):
        for number in range(1, count + 1):
            stride = 2 if number == 1 and stage > 2 else 1
            before = layers.shape
            if number == 1:  # the shortcut
                layers.conv(4 * channels, 1, stride, bias=False, kept=1)
                layers.shape = before
            layers.conv(channels, 1, stride, bias=False, kept=2)
            layers.conv(channels, 3, bias=False, kept=2)
            layers.conv(4 * channels, 1, bias=False, kept=2)
            layers.end(f"conv{stage}_{number}")
    layers.pool(7)
    layers.full(1000)
    layers.end("fc")
    return layers.profile()


MODELS = {"VGG-19": vgg19, "ResNet-152": resnet152}


def flop(profile: Profile) -> float:
    """FLOPs of one image's forward pass."""
    forward_s = sum(layer.forward_s for layer in profile.layers)
    return forward_s * V_FLOP_PER_S[profile.model] / profile.batch_size
