"""Last pass: the time of one step by part, what binds it, and what the split and the fleet gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from planner.passes.calibrated import calibrated_time
from planner.passes.cost import seconds
from planner.passes.gain import gains
from planner.passes.ledger import Ledger
from planner.passes.moves import moves_of
from planner.passes.ranks import kind_of, rank_facts, update_gain, world_size
from schemas.document import reading, unknown
from schemas.form import Json

NO_DIFFERENCE = 0.03  # a predicted gain this near to 1 is none
_RATES = ("products", "bandwidth", "launch")
_CARRIED = {"link": "host_link", "host_rows": "host_row"}


def step(
    request: Mapping[str, Json], record: Mapping[str, Json], account: Mapping[str, Json], draft: Mapping[str, Json]
) -> dict[str, Json]:
    """Predict every rank's step by part, the fleet's step, its regime and its gain."""
    ledger = Ledger(draft)
    places = range(len(ledger.draft["ranks"]))
    for place in places:
        _work(ledger, account, place)
        _compute(ledger, place)
    fleet = world_size(draft) > 1
    if fleet:
        for place in places:
            _exchange(ledger, account, place)
        _hidden(ledger)
    for place in places:
        _total(ledger, place)
    _fleet(ledger)
    if fleet:
        gains(ledger, request, account)
    _regime(ledger)
    _verdict(ledger)
    return ledger.draft


def _work(ledger: Ledger, account: Mapping[str, Json], place: int) -> None:
    entry, base = ledger.draft["ranks"][place], f"/ranks/{place}"
    rank = rank_facts(ledger.draft, account, place)
    mechanisms = [*ledger.value("/fit/mechanisms"), *entry["mechanisms"]["chosen"]]
    inputs = ["/workload/digest", f"{base}/batch", f"{base}/seq", f"{base}/dtype", f"{base}/mechanisms"]
    units = {"flops": "FLOP", "bytes": "B", "launches": "", "link": "B", "host_rows": ""}
    told = {"link": "bytes to host memory and back", "host_rows": "rows of tables that the host brings and updates"}
    for key, value in rank.work(entry["batch"]["chosen"], entry["seq"]["chosen"], mechanisms).items():
        if key in told and not value:
            continue
        why = f"{told.get(key, key)} of forward and backward, counted on the meta build"
        ledger.put(f"{base}/demand/{key}", reading(float(value), units[key], "computed", why, inputs=inputs))
    source = "/exchange/owners" if "owners" in ledger.draft["exchange"] else "/workload/digest"
    for key, value in rank.update_work(mechanisms).items():
        why = f"{key} of the optimizer's step: owned matrices and AdamW"
        item = reading(float(value), units[key], "computed", why, inputs=[source])
        ledger.put(f"{base}/demand/optimizer_{key}", item)


def _compute(ledger: Ledger, place: int) -> None:
    base, kind = f"/ranks/{place}", kind_of(ledger.draft, ledger.draft["ranks"][place])
    how = "launches x launch + " if kind == "cpu" else "the longer of launches x launch and "

    demand = ledger.draft["ranks"][place]["demand"]
    for part, prefix in (("compute", ""), ("optimizer", "optimizer_")):
        carried = [key for key in _CARRIED if prefix + key in demand]
        gains = ["update_gain"] if part == "optimizer" and kind != "cpu" else []
        rates = [f"{base}/rates/{name}" for name in (*_RATES, *gains, *[_CARRIED[key] for key in carried])]
        work = [f"{base}/demand/{prefix}{name}" for name in ("flops", "bytes", "launches", *carried)]
        copies = " or link / host link" if "link" in carried else ""
        rows = " + rows x the host's time a row" if "host_rows" in carried else ""
        reached = "(FLOP / products + bytes / bandwidth) / gain" if gains else "FLOP / products + bytes / bandwidth"
        said = (
            f"{how}{reached}{copies}{rows}",
            f"{base}/batch" if part == "compute" else None,
        )
        taught = f"{base}/calibration/{part}"
        time = _modelled_by(kind, carried, gains)
        calibrated_time(ledger, f"{base}/step/{part}", taught, time, work, rates, said, measurable=True)


def _modelled_by(kind: str, carried: list[str], gains: list[str]) -> Callable[..., float]:
    """The formula of one half of a rank's step: work, then what is ``carried``, then rates, ``gains`` among them."""

    def time(*values: float) -> float:
        flops, moved, launches, *amounts = values[: 3 + len(carried)]
        products, bandwidth, launch, *others = values[3 + len(carried) :]
        of, at = dict(zip(carried, amounts, strict=True)), dict(zip([*gains, *carried], others, strict=False))
        rates = (products, bandwidth, launch, at.get("link", math.inf), at.get("host_rows", 0.0))
        brought = of.get("link", 0.0), of.get("host_rows", 0.0)
        return seconds(kind, flops, moved, launches, rates, *brought, gain=at.get("update_gain", 1.0))

    return time


def _exchange(ledger: Ledger, account: Mapping[str, Json], place: int) -> None:
    base, moves = f"/ranks/{place}", moves_of(ledger.draft)
    computes = [f"/ranks/{other}/step/compute" for other in range(len(ledger.draft["ranks"]))]
    why = "wait for the slowest rank + all-reduce - what all buckets but the last hide behind its backward (2/3 of it)"
    if moves.gathers is not None and moves.overlaps:
        why = "wait for the slowest rank + gathers and sums - what all units but one hide behind forward and backward"
    elif moves.gathers is not None:
        why = "wait for the slowest rank + gathers and sums, each of which a CPU rank waits for"
    ledger.compute(
        f"{base}/step/exchange",
        "s",
        lambda own, total, ahead, *all_computes: moves.exposed(own, max(all_computes), total, ahead),
        [f"{base}/step/compute", "/exchange/seconds", _ahead(ledger), *computes],
        why,
        measurable=True,
    )
    if "owners_seconds" in ledger.draft["exchange"]:
        _owners(ledger, account, place)


def _ahead(ledger: Ledger) -> str:
    """The input of an exchange beside its seconds: those of its forward, or the bytes that cannot hide."""
    return "/exchange/forward_seconds" if "forward_seconds" in ledger.draft["exchange"] else "/exchange/last_bucket"


def _hidden(ledger: Ledger) -> None:
    """The share of the exchange behind compute, on the rank with most room for it: which computes longest."""
    computes = [f"/ranks/{place}/step/compute" for place in range(len(ledger.draft["ranks"]))]
    moves = moves_of(ledger.draft)

    def share(total: float, ahead: float, *all_computes: float) -> float:
        return 1 - moves.waited(max(all_computes), total, ahead) / total if total else 0.0

    why = "the share of all buckets but the last that backward (2/3 of the longest compute) has room for"
    if moves.gathers is not None:
        why = "the share of gathers and sums that forward and backward have room for"
    sources = ["/exchange/seconds", _ahead(ledger), *computes]
    ledger.compute("/exchange/hidden", "", share, sources, why, measurable=True)


def _owners(ledger: Ledger, account: Mapping[str, Json], place: int) -> None:
    rank, base = rank_facts(ledger.draft, account, place), f"/ranks/{place}"
    calibrated_time(
        ledger,
        f"{base}/step/owners",
        "/exchange/calibration/owners",
        lambda gather, launch: gather + rank.packing_seconds(launch),
        ["/exchange/owners_seconds"],
        [f"{base}/rates/launch"],
        ("every owner's updates packed, two launches a matrix, and sent to every rank", None),
        measurable=True,
    )


def _total(ledger: Ledger, place: int) -> None:
    """All parts of a rank's step. Where ranks wait for each other it is reckoned from the slowest rank's compute, and
    not as the sum of the parts' ends: a rank that is itself slow waits for no other."""
    base, parts = f"/ranks/{place}", ledger.draft["ranks"][place]["step"]
    after = [f"{base}/step/{name}" for name in ("optimizer", "owners") if name in parts]
    if "exchange" not in parts:
        sources = [f"{base}/step/compute", *after]
        ledger.compute(f"{base}/step/total", "s", lambda *all_: sum(all_), sources, "all parts", measurable=True)
    else:
        computes = [f"/ranks/{other}/step/compute" for other in range(len(ledger.draft["ranks"]))]
        count = len(computes)

        moves = moves_of(ledger.draft)

        def total(own: float, exchanged: float, ahead: float, *rest: float) -> float:
            return own + moves.exposed(own, max(rest[:count]), exchanged, ahead) + sum(rest[count:])

        sources = [f"{base}/step/compute", "/exchange/seconds", _ahead(ledger), *computes, *after]
        ledger.compute(f"{base}/step/total", "s", total, sources, "all parts", measurable=True)
    sources = [f"{base}/tokens", f"{base}/step/total"]
    why = "the rank's tokens / total"
    pointer = f"{base}/step/tokens_per_second"
    ledger.compute(pointer, "tokens/s", lambda n, s: n / s, sources, why, measurable=True)


def _fleet(ledger: Ledger) -> None:
    totals = [f"/ranks/{place}/step/total" for place in range(len(ledger.draft["ranks"]))]
    why = "the slowest rank's total"
    ledger.compute("/step/seconds", "s", lambda *values: max(values), totals, why, measurable=True)
    sources, why = ["/step/global_tokens", "/step/seconds"], "all ranks' tokens / step"
    pointer = "/step/tokens_per_second"
    ledger.compute(pointer, "tokens/s", lambda n, s: n / s, sources, why, measurable=True)


def _regime(ledger: Ledger) -> None:
    """What the step's time is mostly made of, on the rank that computes longest: the host's launches, the device's work
    (products, and bytes of its own memory), or what travels (between ranks, or to host memory and back)."""
    if ledger.value("/step/seconds") is None:
        ledger.put("/step/regime", unknown("", "the step's time is unknown", inputs=["/step/seconds"]))
        return
    place = max(
        range(len(ledger.draft["ranks"])), key=lambda place: ledger.value(f"/ranks/{place}/step/compute") or 0.0
    )
    entry = ledger.draft["ranks"][place]
    times = {name: item["value"] for name, item in entry["step"].items() if item["unit"] == "s"}
    kind = kind_of(ledger.draft, entry)
    parts = {"launch": 0.0, "compute": 0.0, "link": times.get("exchange", 0.0) + times.get("owners", 0.0)}
    for part, prefix in (("compute", ""), ("optimizer", "optimizer_")):
        for name, share in _shares(kind, entry, prefix).items():
            parts[name] += share * times[part]
    name = max(parts, key=lambda key: parts[key])
    shares = ", ".join(f"{key} {value / times['total']:.0%}" for key, value in parts.items())
    why = f"{shares}{_of_launches(kind, entry, name == 'launch')}"
    ledger.put("/step/regime", reading(f"{name}-bound", "", "computed", why, inputs=["/step/seconds"]))


def _modelled(entry: Mapping[str, Json], prefix: str) -> dict[str, float] | None:
    """Seconds that launches, products and copies of one half of a rank's step take each for itself; None: unknown."""
    rates = {name: item["value"] for name, item in entry["rates"].items()}
    if None in [rates[name] for name in _RATES]:
        return None
    work = {key: entry["demand"].get(prefix + key, {"value": 0.0})["value"] for key in ("flops", "bytes", "launches")}
    carried = {key: entry["demand"].get(prefix + key, {"value": 0.0})["value"] for key in _CARRIED}
    return {
        "launch": work["launches"] * rates["launch"],
        "compute": (work["flops"] / rates["products"] + work["bytes"] / rates["bandwidth"])
        / (update_gain(entry) if prefix else 1.0),
        "link": carried["link"] / (rates.get("host_link") or math.inf),
        "rows": carried["host_rows"] * (rates.get("host_row") or 0.0),
    }


def _shares(kind: str, entry: Mapping[str, Json], prefix: str) -> dict[str, float]:
    """What the seconds of one half of a rank's step go to. Of a card's three at a time the longest shows; the rows of
    tables in host memory come after them."""
    times = _modelled(entry, prefix)
    if times is None or not any(times.values()):
        return {"compute": 1.0}
    rows, found = times.pop("rows"), times
    if kind != "cpu":
        longest = max(times, key=lambda key: times[key])
        found = {longest: times[longest]}
    found = {**found, "link": found.get("link", 0.0) + rows}
    total = sum(found.values())
    return {name: value / total for name, value in found.items()}


def _of_launches(kind: str, entry: Mapping[str, Json], binds: bool) -> str:
    """The numbers that tell a launch-bound step from another."""
    times = _modelled(entry, "")
    if times is None:
        return ""
    count, cost = entry["demand"]["launches"]["value"], entry["rates"]["launch"]["value"]
    told = (
        f"; forward and backward launch {count:.0f} operators, {1e6 * cost:.3g} us each: {1e3 * times['launch']:.3g} ms"
    )
    told += f", beside {1e3 * times['compute']:.3g} ms of work"
    if kind == "cpu" or not binds or times["launch"] <= times["compute"]:
        return told
    return f"{told}: more work a step costs little until the two are even"


def _verdict(ledger: Ledger) -> None:
    gain = ledger.draft["step"].get("gain_over_best")
    if gain is None:
        text, inputs = "one rank: nothing to gain from a split", ["/step/global_batch"]
    elif gain["value"] is None:
        ledger.put("/step/verdict", unknown("", "the gain is unknown", inputs=["/step/gain_over_best"]))
        return
    else:
        inputs = ["/step/gain_over_best", "/step/gain_over_even"]
        even = ledger.value("/step/gain_over_even")
        near = abs(gain["value"] - 1) < NO_DIFFERENCE
        more = "no faster" if near else "faster" if gain["value"] > 1 else "SLOWER"
        text = f"{gain['value']:.3g}x the best device alone ({more} than it)"
        text += ", and an even split does not fit" if even is None else f", {even:.3g}x an even split"
    ledger.put("/step/verdict", reading(text, "", "computed", "from the predicted step times", inputs=inputs))
