"""Every number that a plan assumes: value, range and origin. Each enters a plan as a reading with basis "assumed"."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.document import reading
from schemas.form import Json


@dataclass(frozen=True)
class Assumed:
    """A constant with its range and where it comes from."""

    value: float
    low: float
    high: float
    unit: str
    origin: str

    def reading(self) -> dict[str, Json]:
        return reading(self.value, self.unit, "assumed", self.origin, low=self.low, high=self.high)


MEBI = 2**20

# A budget of N bytes is filled to nine tenths: the rest is for what no estimate sees (fragmentation, other users).
FIT_HEADROOM = 0.9
# On a card, no less than this is left, or of separate segments a larger share: of 30 and of 22 plans that filled nine
# tenths, 3 (below 1 GiB, by 122 MiB) and 7 found no gap for a block.
ALLOCATOR_PAGES_BYTES = 192 * MEBI
SEGMENTS_HEADROOM = 0.7
# Of free memory, this much is left alone.
FREE_MARGIN_BYTES = 512 * MEBI

# The gradient payload is cut into eight buckets, none smaller than a link wants and none larger than overlap wants.
BUCKETS_WANTED = 8
SMALLEST_BUCKET_BYTES = 4 * MEBI
LARGEST_BUCKET_BYTES = 128 * MEBI

CPU_FLOPS_PER_LANE = Assumed(
    2.0, 0.6, 4.0, "FLOP/cycle", "one fused multiply-add a lane and cycle; small products reach less, two ports more"
)
CPU_FP16_FLOPS = Assumed(
    1.6, 0.8, 64.0, "FLOP/cycle", "a core's fp16 products are scalar (1.6 seen) unless it has AVX512-FP16"
)
CPU_BANDWIDTH = Assumed(
    1.3e10, 4e9, 3e10, "B/s", "one core's operand traffic, between its share of memory and its cache"
)
CPU_LAUNCH_SECONDS = Assumed(6e-6, 3e-6, 1.2e-5, "s", "dispatch and autograd of one PyTorch operator on a CPU")
CPU_CLOCK_HZ = Assumed(2.5e9, 1.5e9, 5e9, "Hz", "a server or desktop core of the last ten years")
LOOPBACK_RATE = Assumed(9e8, 3e8, 4e9, "B/s", "gloo between processes of one machine, small payloads on busy cores")
LOOPBACK_LATENCY = Assumed(2e-4, 5e-5, 1e-3, "s", "one gloo step between processes of one machine")

GPU_LAUNCH_SECONDS = Assumed(4e-5, 1.2e-5, 8e-5, "s", "host time of a model's operator: 2.2e-5 to 6.2e-5 seen")
# A timed card is timed at its best: one large product, one large copy, a small model's operators. A model's own mix
# reaches a share of that, and an operator of it costs more host time: colder caches.
GPU_MIX_EFFICIENCY = Assumed(0.6, 0.4, 1.0, "", "share of a timed rate that a model's mix reaches: 0.55 seen")
GPU_UPDATE_GAIN = Assumed(1.33, 1.0, 1.6, "", "an optimizer's rates over a model's mix's: 1.27 to 1.36 seen of b1")
GPU_LAUNCH_OVERHEAD = Assumed(
    1.7, 1.1, 2.2, "", "host time of a model's operator over that of a few small layers: 1.1 to 2.2 seen"
)
GPU_BUCKET_SECONDS = Assumed(1.5e-4, 5e-5, 5e-4, "s", "hook, casts and stream waits of a bucket: 1e-4 to 3e-4 seen")
GPU_PRODUCT_EFFICIENCY = Assumed(0.5, 0.25, 0.8, "", "share of the peak matrix rate that mixed layer shapes reach")
GPU_BANDWIDTH_EFFICIENCY = Assumed(0.75, 0.5, 0.92, "", "share of the peak memory rate that elementwise code reaches")

# All-reduce over each path between cards: the share of the link's rate that the ring reaches, a ring step's latency.
# Measured on two H200: NVLink 250 (31 MB) to 341 (2 GB) of 450 GB/s, staged through host memory 30 of 63 GB/s. Of
# NVLink the line with the least relative error from 1 MB to 2 GB on two pairs: 22% off at 1.8 MB, where NCCL changes
# its protocol, 16% at most above, 6% in the middle.
PATH_EFFICIENCY = {
    "nvlink": Assumed(0.65, 0.5, 0.82, "", "ring all-reduce over NVLink: 0.56 to 0.76 seen on two H200"),
    "p2p": Assumed(0.78, 0.6, 0.85, "", "ring all-reduce by direct peer-to-peer over PCIe, as reported"),
    "staged": Assumed(
        0.48, 0.35, 0.6, "", "staged through host memory: 0.48 on two H200, the same reported of two RTX 5090"
    ),
}
# More than two cards on one host bridge: 0.35 to 0.65 reported of eight.
PATH_EFFICIENCY_OF_MANY = {
    "p2p": Assumed(0.55, 0.35, 0.78, "", "ring all-reduce by peer-to-peer of more than two cards"),
    "staged": Assumed(0.4, 0.25, 0.55, "", "staged through host memory by more than two cards that share it"),
}
PATH_LATENCY = {
    "nvlink": Assumed(9.5e-6, 5e-6, 3e-5, "s", "a ring step of NCCL over NVLink: 9.5e-6 fitted on two H200"),
    "p2p": Assumed(2e-5, 1e-5, 6e-5, "s", "a ring step of NCCL by peer-to-peer over PCIe"),
    "staged": Assumed(1.2e-5, 8e-6, 6e-5, "s", "a ring step of NCCL through host memory: 9e-6 fitted on two H200"),
}
# Pinned memory to a card and back. Two H200 on gen5 x16: 55.4 of 63 GB/s each way.
HOST_LINK_EFFICIENCY = Assumed(0.85, 0.6, 0.92, "", "share of its PCIe lanes that a pinned copy reaches: 0.88 seen")
HOST_LINK_RATE = Assumed(1.2e10, 3e9, 5.5e10, "B/s", "a card on 16 lanes of PCIe 3, up to gen5")
# One host thread updates a row of a table and sends it: four reads, three writes, a rule of some fifteen operations.
HOST_ROW_SECONDS = Assumed(7.5e-7, 3e-7, 1.5e-6, "s", "a host thread's time for a row of a table: 7.5e-7 to 9e-7 seen")
NVLINK_BYTES_A_LINK = Assumed(2.5e10, 2e10, 5e10, "B/s", "one NVLink of generation 2 to 4, one way")

ALLOCATOR_OVERHEAD = {
    "none": Assumed(1.0, 0.97, 1.1, "", "the CPU allocator returns what it was asked for, 64 B aligned"),
    "expandable": Assumed(1.0, 0.99, 1.01, "", "blocks are multiples of 512 B; what is reserved is apart"),
    "segments": Assumed(1.0, 0.98, 1.04, "", "a block may be 1 MiB larger than asked; what is reserved is apart"),
}
# What the allocator takes of the card for a byte of the peak: it keeps what is returned, and not every gap is filled.
ALLOCATOR_RESERVE = {
    "expandable": Assumed(1.045, 1.01, 1.25, "", "bytes reserved over the peak: 1.01 to 1.25 seen, mostly to 1.09"),
    "segments": Assumed(
        1.18, 1.04, 1.5, "", "bytes reserved over the peak: 1.04 to 1.48 seen on an H200, mostly 1.1 to 1.3"
    ),
}
# Torch gives each cuBLAS handle a workspace, and each thread has a handle: that of forward and that of backward.
# The size is torch's default by compute capability (CublasHandlePool.cpp: 32 MiB, else :4096:2:16:8).
_WORKSPACE_THREADS = 2
_WORKSPACE_MAJORS = {"9", "10", "12"}
GPU_WORKSPACE_BYTES = Assumed(
    _WORKSPACE_THREADS * 32 * MEBI, 32 * MEBI, 70 * MEBI, "B", "a cuBLAS workspace of 32 MiB for each of two threads"
)
GPU_SMALL_WORKSPACE_BYTES = Assumed(
    _WORKSPACE_THREADS * 8_519_680, 8_519_680, 70 * MEBI, "B", "a cuBLAS workspace of 8.1 MiB for each of two threads"
)


def workspace(sm: str | None) -> Assumed:
    """What cuBLAS holds on a card of compute capability ``sm`` ("8.6"; None: unknown, so the most)."""
    large = sm is None or str(sm).partition(".")[0] in _WORKSPACE_MAJORS
    return GPU_WORKSPACE_BYTES if large else GPU_SMALL_WORKSPACE_BYTES


# Of what an account counts for kernels whose own memory torch tells of real tensors alone.
RECURRENT_SHARE = {
    "cpu": Assumed(1.0, 0.9, 1.09, "", "oneDNN's workspace by a formula: 0.91 to 1.08 seen at 25 sizes"),
    "cuda": Assumed(1.0, 0.4, 1.3, "", "what cuDNN keeps: 8, 6 or 2 numbers (LSTM, GRU, RNN) assumed, never measured"),
}
PROCESS_BYTES = Assumed(5.5e8, 3e8, 1.2e9, "B", "resident size of a process that has imported PyTorch")
