"""The exact search over sets of memory mechanisms and splits of the batch: what each set leaves and costs on each rank.

A rank's own mechanisms are chosen for it alone, those that alter an update for the whole fleet; how many samples a rank
gets decides what it must engage, and what it engages how fast they are. So sets and split are searched together: for
each set of the fleet, each rank's time as a function of its samples under the best of its own sets that fits, and the
split of those curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from planner.passes.cost import ratio_at
from planner.passes.mechanisms import Mechanisms, Offer, offer
from planner.passes.moves import moves_of
from planner.passes.ranks import host_room, rank_facts
from planner.passes.split import Curve, Group, largest_within, split_samples
from schemas.form import Json

MOST_SAMPLES = 2**20


class Pick(Protocol):
    """What an entry with so many samples engages; None where it does not fit."""

    def __call__(self, place: int, samples: int) -> Candidate | None: ...


@dataclass(frozen=True)
class Candidate:
    """One rank with so many samples under one set of mechanisms: its predicted peak and what it holds in host memory,
    in bytes; the seconds that the fleet's slowest rank is found by, and those that come after all ranks have met (None:
    rates unknown)."""

    mechanisms: Mechanisms
    peak: float
    hosted: int
    seconds: float | None
    after: float | None

    @property
    def time(self) -> float:
        return (self.seconds or 0.0) + (self.after or 0.0)


@dataclass(frozen=True)
class Choice:
    """The fleet's mechanisms, and each entry's whole set."""

    fleet: Mechanisms
    picks: tuple[Candidate, ...]


@dataclass(frozen=True)
class Division:
    """The samples of each rank of each entry, and the entries' times of so many, under the mechanisms that go with."""

    batches: list[list[int]]
    curves: list[Curve]


class Search:
    """What a draft's fleet may engage. A set of mechanisms is small, so every one is weighed: 2^mechanisms a rank."""

    def __init__(self, draft: Mapping[str, Json], request: Mapping[str, Json], account: Mapping[str, Json]) -> None:
        entries = draft["ranks"]
        self.offer: Offer = offer(draft, request, account)
        self.off = request["fit"] in (None, "off")
        self.asked = None if request["fit"] is None else request["fit_policy"] or "cheapest"
        self.ranks = [rank_facts(draft, account, place) for place in range(len(entries))]
        self.counts = [len(entry["members"]) for entry in entries]
        self.lengths = [entry["seq"]["chosen"] for entry in entries]
        self.limits = [entry["memory"]["limit"]["value"] for entry in entries]
        self.rooms = [host_room(draft, entry) for entry in entries]
        self.alone = sum(self.counts) == 1
        # Without rates no set is known to be the cheapest.
        self.blind = any(rank.rates is None for rank in self.ranks)
        self.in_order = self.asked == "in-order" or self.blind
        self._exchange(draft)
        self._known: dict[tuple[int, int, Mechanisms], Candidate] = {}
        self._timed: dict[tuple[int, int, Mechanisms], tuple[float, float]] = {}

    def _exchange(self, draft: Mapping[str, Json]) -> None:
        exchange = draft["exchange"]
        self._moves = moves_of(draft) if "seconds" in exchange else None
        self._moved = [exchange.get(name, {}).get("value") or 0.0 for name in ("seconds", "forward_seconds")]
        gather = exchange.get("owners_seconds", {}).get("value") or 0.0
        taught = exchange.get("calibration", {}).get("owners", {}).get("value", ())
        sending = [rank.packing_seconds(rank.rates[2]) if rank.rates else 0.0 for rank in self.ranks]
        self._sending = [(gather + packing) * ratio_at(taught, 0) for packing in sending]

    def names(self, scope: str, place: int | None = None) -> Mechanisms:
        kinds = {self.ranks[place].kind} if place is not None else {rank.kind for rank in self.ranks}
        return self.offer.names(scope, kinds)

    def fleets(self) -> list[Mechanisms]:
        """The sets that the whole fleet may engage."""
        return self._sets(self.names("fleet"))

    def candidates(self, place: int, samples: int, fleet: Mechanisms) -> list[Candidate]:
        """Entry ``place`` with ``samples`` under each of its own sets beside the ``fleet``'s."""
        own = self._sets(self.names("rank", place), fleet)
        return [self.weigh(place, samples, (*fleet, *held)) for held in own]

    def _sets(self, names: Mechanisms, beside: Mechanisms = ()) -> list[Mechanisms]:
        if self.off:
            return [tuple(name for name in names if name in self.offer.asked)]
        return self.offer.subsets(names, beside)

    def weigh(self, place: int, samples: int, mechanisms: Mechanisms) -> Candidate:
        key = place, samples, mechanisms
        if key not in self._known:
            rank, length = self.ranks[place], self.lengths[place]
            seconds = after = None
            if rank.rates is not None:
                # A gain in time counts for nothing, also beside another mechanism: it would engage what is not needed.
                times = [self._times(place, samples, held) for held in self.offer.subsets(mechanisms, asked=())]
                seconds, after = (
                    (max(map(sum, times)), 0.0) if self.alone else (max(t[0] for t in times), max(t[1] for t in times))
                )
            peak, hosted = rank.peak(samples, length, mechanisms), rank.hosted(samples, length, mechanisms)[0]
            self._known[key] = Candidate(mechanisms, peak, hosted, seconds, after)
        return self._known[key]

    def _times(self, place: int, samples: int, mechanisms: Mechanisms) -> tuple[float, float]:
        key = place, samples, mechanisms
        if key not in self._timed:
            rank, length = self.ranks[place], self.lengths[place]
            after = rank.update_seconds(mechanisms) + self._sending[place]
            self._timed[key] = rank.compute_seconds(samples, length, mechanisms), after
        return self._timed[key]

    def seconds(self, place: int, samples: int, mechanisms: Mechanisms) -> float:
        """The predicted time of forward, backward and all that comes after, gains counted too."""
        return sum(self._times(place, samples, mechanisms))

    def holds(self, place: int, candidate: Candidate) -> bool:
        """Whether device and host have room for it."""
        limit, room = self.limits[place], self.rooms[place]
        return (limit is None or candidate.peak <= limit) and (room is None or candidate.hosted <= room)

    def step_seconds(self, choice: Choice) -> float:
        """The fleet's step: until the slowest rank is there, what of the all-reduce is not hidden, and what comes
        after."""
        slowest = max(pick.seconds or 0.0 for pick in choice.picks)
        after = max(pick.after or 0.0 for pick in choice.picks)
        return slowest + after + (self._moves.waited(slowest, *self._moved) if self._moves else 0.0)

    def best(self, place: int, samples: int, fleet: Mechanisms) -> Candidate | None:
        """The fastest that fits; of equals the one with the fewest inexact mechanisms, then with the fewest."""
        fitting = [item for item in self.candidates(place, samples, fleet) if self.holds(place, item)]
        return min(fitting, key=lambda item: (item.time, *self._many(item.mechanisms)), default=None)

    def _many(self, names: Sequence[str]) -> tuple[int, int]:
        return sum(not self.offer.rows[name]["exact"] for name in names), len(names)

    def _rank(self, choice: Choice) -> tuple[float, int, int]:
        engaged = [name for pick in choice.picks for name in pick.mechanisms]
        return self.step_seconds(choice), *self._many(engaged)

    def choose(self, batches: Sequence[int]) -> Choice | None:
        """What each entry engages with its batch; None where no set fits. Without --fit what was asked for alone,
        whether it fits or not."""
        if self.off:
            (fleet,) = self.fleets()
            return Choice(fleet, tuple(self.candidates(place, b, fleet)[0] for place, b in enumerate(batches)))
        if self.in_order:
            return next((made for made in self._prefixes(batches) if self.all_hold(made)), None)
        found = (self.fastest(batches, fleet) for fleet in self.fleets())
        return min((made for made in found if made is not None), key=self._rank, default=None)

    def fastest(self, batches: Sequence[int], fleet: Mechanisms) -> Choice | None:
        """The fastest choice beside the ``fleet``'s mechanisms; None where a rank fits with none of its sets."""
        picks = [self.best(place, b, fleet) for place, b in enumerate(batches)]
        found = tuple(pick for pick in picks if pick is not None)
        return Choice(fleet, found) if len(found) == len(picks) else None

    def most(self, batches: Sequence[int]) -> Choice:
        """Where nothing fits: what in-order ends with, else what leaves least."""
        if self.in_order:
            return self._prefixes(batches)[-1]
        fleet = self.fleets()[-1]
        picks = (min(self.candidates(place, b, fleet), key=lambda item: item.peak) for place, b in enumerate(batches))
        return Choice(fleet, tuple(picks))

    def all_hold(self, choice: Choice) -> bool:
        return all(self.holds(place, pick) for place, pick in enumerate(choice.picks))

    def _prefixes(self, batches: Sequence[int]) -> list[Choice]:
        """What is engaged once the first 0, 1, ... mechanisms of the order had their turn."""
        made = []
        for turns in range(len(self.offer.rows) + 1):
            picks = tuple(self._after(place, b, turns) for place, b in enumerate(batches))
            made.append(Choice(self._engaged(0, batches[0], turns)[0], picks))
        return made

    def _engaged(self, place: int, samples: int, turns: int) -> tuple[Mechanisms, Mechanisms]:
        """(the fleet's, the rank's own) after so many turns: the fleet's as they come, a rank's own only while it does
        not fit. Begins with what was asked for."""
        names, own_names = self.names("fleet"), self.names("rank", place)
        fleet = tuple(name for name in names if name in self.offer.asked)
        own = tuple(name for name in own_names if name in self.offer.asked)
        for name in list(self.offer.rows)[:turns]:
            if name in names and name not in fleet:
                fleet = (*fleet, name)
            elif name in own_names and name not in own:
                own = self._next(place, samples, fleet, own, name)
        return fleet, own

    def _next(self, place: int, samples: int, fleet: Mechanisms, own: Mechanisms, name: str) -> Mechanisms:
        """``own`` with ``name``, where the rank does not fit without. Where others exclude it, it takes their place if
        that leaves less."""
        now = self.weigh(place, samples, (*fleet, *own))
        if self.holds(place, now):
            return own
        if self.offer.together((*own, name)):
            return (*own, name)
        kept = tuple(other for other in own if self.offer.together((other, name)))
        if set(own) & set(self.offer.asked) - set(kept):
            return own
        return (*kept, name) if self.weigh(place, samples, (*fleet, *kept, name)).peak < now.peak else own

    def divide(self, total: int) -> Division | None:
        """The split of ``total`` samples, over all that may be engaged; None where none fits every rank.

        Cheapest: that of the shortest step. In order: of those that the fewest turns let fit, the one whose slowest
        rank is fastest.
        """
        if self.in_order and not self.off:
            turns = range(len(self.offer.rows) + 1)
            found = (self._divided(total, partial(self._in_turn, turns=count)) for count in turns)
            return next((made for made in found if made is not None), None)
        best: tuple[tuple[float, int, int], Division] | None = None
        for fleet in self.fleets():
            made = self._divided(total, partial(self.best, fleet=fleet))
            if made is not None:
                key = self._rank(self._slowest(made, fleet))
                best = (key, made) if best is None or key < best[0] else best
        return best[1] if best is not None else None

    def _slowest(self, made: Division, fleet: Mechanisms) -> Choice:
        picks = [self.best(place, max(row), fleet) for place, row in enumerate(made.batches)]
        return Choice(fleet, tuple(pick for pick in picks if pick is not None))

    def _after(self, place: int, samples: int, turns: int) -> Candidate:
        fleet, own = self._engaged(place, samples, turns)
        return self.weigh(place, samples, (*fleet, *own))

    def _in_turn(self, place: int, samples: int, turns: int) -> Candidate | None:
        found = self._after(place, samples, turns)
        return found if self.holds(place, found) else None

    def _divided(self, total: int, pick: Pick) -> Division | None:
        groups = [self._group(place, total, pick) for place in range(len(self.ranks))]
        batches = split_samples(total, groups)
        return Division(batches, [group.seconds for group in groups]) if batches is not None else None

    def _group(self, place: int, total: int, pick: Pick) -> Group:
        def seconds(samples: int) -> float:
            found = pick(place, samples)
            return float("inf") if found is None or found.seconds is None else found.seconds

        def work(samples: int) -> float:
            return self.ranks[place].sample_seconds(samples, self.lengths[place])

        most = min(total, MOST_SAMPLES)
        cap = largest_within(most, lambda samples: pick(place, samples) is not None) if pick(place, 1) else 0
        return Group(self.counts[place], seconds, cap, work)
