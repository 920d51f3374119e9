"""First pass: what each rank computes with. Capability, dtype, kernels, threads, and the rates it is reckoned by."""

from __future__ import annotations

from collections.abc import Mapping

from planner.passes import constants
from planner.passes.calibration import calibrate_ranks
from planner.passes.kernels import put_kernel
from planner.passes.layout import device_pointer, per_rank
from planner.passes.ledger import Ledger
from planner.passes.legality import SLOW_FP16, is_gtx16, legal
from planner.passes.link import lane_rate
from planner.passes.mechanisms import kinds_of
from planner.passes.ranks import sharing, world_size
from planner.passes.served import put_served
from schemas.document import RUNGS, reading, resolve, unknown
from schemas.form import Json


def policy(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Decide dtype, kernels and threads of every rank, and the fleet's Newton-Schulz dtype."""
    ledger = Ledger(draft)
    for place, entry in enumerate(ledger.draft["ranks"]):
        base = f"/ranks/{place}"
        device = device_pointer(ledger.draft, entry)
        _capability(ledger, base, device)
        if ledger.value(f"{device}/kind") == "cuda":
            put_served(ledger, base, device)
        _dtype(ledger, base, device, per_rank(request["dtype"], entry["members"][0]))
        _threads(ledger, base, device)
        ledger.put(f"{base}/kernels", {})  # a model may require none
        for name in account["kernels"]:
            put_kernel(ledger, place, name, request, account)
        _rates(ledger, base, device)
        if carries(account):
            _host_link(ledger, base, device)
        if any("lookups" in row for row in account["mechanisms"].values()):
            ledger.put(f"{base}/rates/host_row", constants.HOST_ROW_SECONDS.reading())
    _drop_kernel_keys(ledger, account)
    _newton_schulz_dtype(ledger, account)
    _adamw(ledger, account)
    _allocator(ledger, account)
    _backend(ledger)
    if world_size(draft) > 1:
        _shard(ledger, request["shard"])
        _reduce_dtype(ledger, request["reduce"])
    calibrate_ranks(ledger, request, account)
    return ledger.draft


def _capability(ledger: Ledger, base: str, device: str) -> None:
    kind = ledger.value(f"{device}/kind")
    source = f"{device}/sm" if kind == "cuda" else f"{device}/kind"
    found = ledger.value(source)
    for rung in RUNGS:
        if found is None and rung != "fp32":
            item = unknown("", "the card does not say its compute capability", inputs=[source])
        else:
            able, why = legal(rung, kind, found if kind == "cuda" else None)
            item = reading(able, "", "computed", why, inputs=[source])
        ledger.put(f"{base}/capability/{rung}", item)


def _dtype(ledger: Ledger, base: str, device: str, asked: str | None) -> None:
    where = f"{base}/capability"
    if asked not in (None, "auto"):
        able = ledger.draft["ranks"][int(base.split("/")[2])]["capability"][asked]
        ledger.decide(f"{base}/dtype", asked, asked, f"asked for; {able['why']}", inputs=[f"{where}/{asked}"])
    elif ledger.value(f"{device}/kind") == "cpu":
        why = "on a CPU fp32 is exact, and bf16 is faster on few processors: it is there when asked for"
        ledger.decide(f"{base}/dtype", asked, "fp32", why, inputs=[f"{where}/fp32"])
    elif ledger.value(f"{where}/bf16"):
        why = resolve(ledger.draft, f"{where}/bf16")["why"]
        ledger.decide(f"{base}/dtype", asked, "bf16", why, inputs=[f"{where}/bf16"])
    else:
        _below_bf16(ledger, base, device, asked)


def _below_bf16(ledger: Ledger, base: str, device: str, asked: str | None) -> None:
    """fp16 where the card has it, with a scaled loss; else fp32, and that is counted."""
    where = f"{base}/capability"
    inputs = [f"{where}/bf16", f"{where}/fp16"]
    half, bf16, fp16 = (ledger.value(f"{where}/fp16"), *(resolve(ledger.draft, source)["why"] for source in inputs))
    rejected = [{"option": "bf16", "why": bf16}]
    found = f"bf16={int(bool(ledger.value(f'{where}/bf16')))} fp16={int(bool(half))}"
    slow = SLOW_FP16.get(ledger.value(f"{device}/sm") or "")
    if half and slow is None and not is_gtx16(ledger.value(f"{device}/name")):
        why = f"{found}: {fp16}; the loss is scaled"
        ledger.decide(f"{base}/dtype", asked, "fp16", why, inputs=inputs, rejected=rejected)
        return
    if slow is not None:
        inputs.append(f"{device}/sm")
        fp16 = f"{fp16}, at {slow} of the rate of fp32: asked for, it halves what activations take, and gains no time"
    elif half:
        fp16 = (
            "a GTX 16xx has it and was seen to give NaN in it: not before a finite check on this very card has passed"
        )
    rejected.append({"option": "fp16", "why": fp16})
    why = f"{found}: fp32 is what is left"
    ledger.decide(f"{base}/dtype", asked, "fp32", why, outcome="fallback", inputs=inputs, rejected=rejected)


MOST_THREADS = 4096  # as the plan's schema has it


def _threads(ledger: Ledger, base: str, device: str) -> None:
    if ledger.value(f"{device}/kind") != "cpu":
        return
    cores = ledger.value(f"{device}/cores")
    if cores is None:
        ledger.decide(f"{base}/threads", None, 1, "the number of cores is unknown", inputs=[f"{device}/cores"])
        return
    ranks = sharing(ledger.draft, ledger.draft["ranks"][int(base.split("/")[2])])
    why = f"{cores} cores shared by {ranks} rank{'s' if ranks > 1 else ''}"
    if cores < ranks:
        why += ": fewer cores than ranks, so each has but a share of one"
    ledger.decide(f"{base}/threads", None, max(1, min(cores // ranks, MOST_THREADS)), why, inputs=[f"{device}/cores"])


def _drop_kernel_keys(ledger: Ledger, account: Mapping[str, Json]) -> None:
    # What a kernel's key asked for is decided rank by rank; the configuration does not say it a second time.
    for name in account["kernels"]:
        ledger.draft["workload"]["config"].pop(name, None)


def _newton_schulz_dtype(ledger: Ledger, account: Mapping[str, Json]) -> None:
    row = account["config"].get("ns_dtype")
    if row is None or row["chosen"] != "auto":
        return
    inputs = [f"/ranks/{place}/capability/bf16" for place in range(len(ledger.draft["ranks"]))]
    kinds = {device["kind"] for device in ledger.draft["fleet"]["devices"].values()}
    native = kinds == {"cuda"} and all(ledger.value(source) for source in inputs)
    why = (
        "every card has native bf16" if native else "not every device has fast bf16 products, and one dtype serves all"
    )
    ledger.decide("/workload/config/ns_dtype", row["asked"], "bf16" if native else "fp32", why, inputs=inputs)


def _adamw(ledger: Ledger, account: Mapping[str, Json]) -> None:
    row = account["config"].get("adamw")
    if row is None or row["chosen"] != "auto":
        return
    kinds = {device["kind"] for device in ledger.draft["fleet"]["devices"].values()}
    inputs = [f"{device_pointer(ledger.draft, entry)}/name" for entry in ledger.draft["ranks"]]
    if kinds == {"cuda"} and len(kinds_of(ledger.draft)) == 1:
        chosen, why = "fused", "every rank is a card of one kind, so torch's fused kernel rounds alike on all"
    else:
        chosen, why = "ieee", "operations that IEEE rounds alike everywhere: not every rank is a card of one kind"
    ledger.decide("/workload/config/adamw", row["asked"], chosen, why, inputs=dict.fromkeys(inputs))


def _allocator(ledger: Ledger, account: Mapping[str, Json]) -> None:
    row = account["config"].get("allocator")
    if row is None or row["chosen"] != "auto":
        return
    devices = ledger.draft["fleet"]["devices"].values()
    nodes = sorted({device["node"] for device in devices if device["kind"] == "cuda"})
    told = [node for node in nodes if "platform" in ledger.draft["fleet"]["nodes"][node]]
    inputs = [f"/fleet/nodes/{node}/platform" for node in told]
    if not nodes:
        chosen, why = "none", "no rank computes on a card"
    elif told == nodes and {ledger.value(source) for source in inputs} == {"linux"}:
        chosen, why = "expandable", "a segment grows by pages, and its blocks are as large as what they hold"
    else:
        chosen, why = "segments", "expandable segments are proven on Linux alone"
    ledger.decide("/workload/config/allocator", row["asked"], chosen, why, inputs=inputs)


def _backend(ledger: Ledger) -> None:
    kinds = {device["kind"] for device in ledger.draft["fleet"]["devices"].values()}
    if world_size(ledger.draft) == 1:
        ledger.decide("/exchange/backend", None, "none", "one rank exchanges nothing: the plain loop, no process group")
    elif kinds == {"cuda"}:
        ledger.decide("/exchange/backend", None, "nccl", "CUDA ranks exchange through NCCL, never through gloo")
    else:
        ledger.decide("/exchange/backend", None, "gloo", "CPU ranks exchange through gloo")


def _shard(ledger: Ledger, asked: str | None) -> None:
    if asked == "fsdp":
        why = "each rank holds its rows of parameters, gradients and moments: FSDP2, which goes with AdamW"
    else:
        why = "each rank holds the whole model; --shard fsdp, with --opt adamw, would share it"
    ledger.decide("/exchange/shard", asked, asked or "none", why, inputs=["/workload/opt"] if asked == "fsdp" else [])


def _reduce_dtype(ledger: Ledger, asked: str | None) -> None:
    inputs = [f"/ranks/{place}/dtype" for place in range(len(ledger.draft["ranks"]))]
    dtypes = {ledger.value(source) for source in inputs}
    if asked not in (None, "auto"):
        ledger.decide("/exchange/reduce_dtype", asked, asked, "asked for")
    elif len(dtypes) == 1:
        why = "the dtype that every rank computes in"
        ledger.decide("/exchange/reduce_dtype", asked, dtypes.pop(), why, inputs=inputs)
    else:
        why = f"ranks compute in {' and '.join(sorted(dtypes))}, and fp32 loses none of them"
        ledger.decide("/exchange/reduce_dtype", asked, "fp32", why, outcome="fallback", inputs=inputs)


def _rates(ledger: Ledger, base: str, device: str) -> None:
    """The three rates that time is reckoned by: products (FLOP/s), memory (B/s) and launches (s each)."""
    dtype, found = ledger.value(f"{base}/dtype"), resolve(ledger.draft, device)
    cpu = found["kind"] == "cpu"
    if cpu:
        _rate(ledger, f"{base}/rates/launch_a_core", device, "launch_seconds", constants.CPU_LAUNCH_SECONDS)
        _rate(ledger, f"{base}/rates/bandwidth_a_core", device, "bandwidth", constants.CPU_BANDWIDTH)
        _cpu_rates(ledger, base, device, f"rate_{dtype}")
        return
    _card_launch(ledger, base, device)
    products = ("products", f"rate_{dtype}", f"peak_{dtype}", "FLOP/s", constants.GPU_PRODUCT_EFFICIENCY)
    memory = ("bandwidth", "bandwidth", "peak_bandwidth", "B/s", constants.GPU_BANDWIDTH_EFFICIENCY)
    for row in (products, memory):
        _card_rate(ledger, base, device, row)
    ledger.put(f"{base}/rates/update_gain", constants.GPU_UPDATE_GAIN.reading())


def _card_launch(ledger: Ledger, base: str, device: str) -> None:
    pointer, timed = f"{base}/rates/launch", f"{device}/operator_seconds"
    if resolve(ledger.draft, device).get("operator_seconds", {}).get("value") is None:
        ledger.put(pointer, constants.GPU_LAUNCH_SECONDS.reading())
        return
    ledger.put(f"{pointer}_overhead", constants.GPU_LAUNCH_OVERHEAD.reading())
    inputs = [timed, f"{pointer}_overhead"]
    ledger.compute(pointer, "s", lambda best, over: best * over, inputs, "as timed x its overhead in a model")


def _card_rate(ledger: Ledger, base: str, device: str, row: tuple[str, str, str, str, constants.Assumed]) -> None:
    """A card's rate: as timed, else its data sheet's peak by the share of it that is reached, else unknown."""
    name, timed, peak, unit, efficiency = row
    found, pointer = resolve(ledger.draft, device), f"{base}/rates/{name}"
    if found.get(timed, {}).get("value") is not None:
        ledger.put(f"{pointer}_efficiency", constants.GPU_MIX_EFFICIENCY.reading())
        inputs = [f"{device}/{timed}", f"{pointer}_efficiency"]
        ledger.compute(pointer, unit, lambda best, share: best * share, inputs, "as timed x the share a mix reaches")
    elif found.get(peak, {}).get("value") is not None:
        ledger.put(f"{pointer}_efficiency", efficiency.reading())
        inputs = [f"{device}/{peak}", f"{pointer}_efficiency"]
        ledger.compute(pointer, unit, lambda sheet, share: sheet * share, inputs, "the data sheet's peak x efficiency")
    else:
        why = f"neither timed nor in a data sheet: run dormouse-plan with --benchmark to have this card's {timed}"
        ledger.put(pointer, unknown(unit, why))


def _host_link(ledger: Ledger, base: str, device: str) -> None:
    """Bytes a second between a card and host memory: as timed, else its PCIe link's, else assumed. On a CPU, a copy."""
    pointer, found = f"{base}/rates/host_link", resolve(ledger.draft, device)
    timed = [f"{device}/{key}" for key in ("host_to_device", "device_to_host") if found.get(key, {}).get("value")]
    lanes = [f"{device}/pcie_generation_max", f"{device}/pcie_width_current"]
    if found["kind"] == "cpu":
        ledger.compute(pointer, "B/s", lambda rate: rate / 2, [f"{base}/rates/bandwidth"], "a copy reads and writes")
    elif len(timed) == 2:
        ledger.compute(pointer, "B/s", min, timed, "copies from and to pinned memory, timed")
    elif all(found.get(source.rpartition("/")[2], {}).get("value") in range(1, 33) for source in lanes):
        ledger.put(f"{pointer}_efficiency", constants.HOST_LINK_EFFICIENCY.reading())

        def rate(generation: int, width: int, share: float) -> float:
            return lane_rate(generation) * width * share

        ledger.compute(pointer, "B/s", rate, [*lanes, f"{pointer}_efficiency"], "PCIe lanes x the share a copy reaches")
    else:
        ledger.put(pointer, constants.HOST_LINK_RATE.reading())


def carries(account: Mapping[str, Json]) -> bool:
    """Whether a mechanism on offer moves bytes between a device and host memory."""
    moved = [row["link"] for row in account["mechanisms"].values() if "link" in row]
    for by_dtype in [by_dtype for by_set in account["compute"].values() for by_dtype in by_set.values()]:
        moved += [forms["link"] for by_variant in by_dtype.values() for forms in by_variant.values()]
    return any(any(form.values()) for form in moved)


def _rate(ledger: Ledger, pointer: str, device: str, key: str, assumed: constants.Assumed) -> None:
    if resolve(ledger.draft, device).get(key, {}).get("value") is not None:
        ledger.compute(pointer, assumed.unit, float, [f"{device}/{key}"], "as the record has it")
    else:
        ledger.put(pointer, assumed.reading())


def _cpu_rates(ledger: Ledger, base: str, device: str, key: str) -> None:
    rates = f"{base}/rates"
    found = resolve(ledger.draft, device)
    ranks = sharing(ledger.draft, ledger.draft["ranks"][int(base.split("/")[2])])
    why = f"the rank's threads, or its share of the cores where {ranks} ranks have fewer between them"
    inputs = [f"{base}/threads", f"{device}/cores"]
    ledger.compute(f"{rates}/effective_cores", "", lambda n, all_: min(n, all_ / ranks), inputs, why)
    inputs, why = [f"{rates}/launch_a_core", f"{rates}/effective_cores"], "a launch on a core, or on a share of one"
    ledger.compute(f"{rates}/launch", "s", lambda launch, n: launch / min(1, n), inputs, why)
    if "bandwidth" in found:
        ledger.compute(f"{rates}/bandwidth", "B/s", float, [f"{rates}/bandwidth_a_core"], "timed with a rank's threads")
    else:
        inputs = [f"{rates}/effective_cores", f"{rates}/bandwidth_a_core"]
        ledger.compute(f"{rates}/bandwidth", "B/s", lambda n, rate: n * rate, inputs, "cores x a core's share")
    if key in found:
        ledger.compute(f"{rates}/products", "FLOP/s", float, [f"{device}/{key}"], "as the record has it")
        return
    clock = f"{device}/clock"
    if found["clock"]["value"] is None:
        clock = f"{rates}/clock"
        ledger.put(clock, constants.CPU_CLOCK_HZ.reading())
    if key == "rate_fp16":
        ledger.put(f"{rates}/flops_a_cycle", constants.CPU_FP16_FLOPS.reading())
        inputs, why = [f"{rates}/effective_cores", clock, f"{rates}/flops_a_cycle"], "cores x clock x FLOP a cycle"
        ledger.compute(f"{rates}/products", "FLOP/s", lambda n, hertz, flops: n * hertz * flops, inputs, why)
        return
    ledger.put(f"{rates}/flops_per_lane", constants.CPU_FLOPS_PER_LANE.reading())
    inputs = [f"{rates}/effective_cores", clock, f"{device}/vector_bits", f"{rates}/flops_per_lane"]
    why = "cores x clock x (vector bits / 32) lanes x FLOP a lane and cycle"
    ledger.compute(
        f"{rates}/products", "FLOP/s", lambda n, hertz, bits, flops: n * hertz * bits / 32 * flops, inputs, why
    )
