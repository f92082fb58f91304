"""A plan for training a model on a fleet: the rules of allocation compared, each with its best N_m. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, Profile

from doll_lab.pipelines.allocation import RULES, Grouping, GroupRates
from doll_lab.pipelines.allocation_search import MAX_STEPS, Found, search
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.placement import default_placement, local_placement, traffic
from doll_lab.pipelines.prediction import Prediction, rates_in_waves

# The smallest N_m within this share of the best throughput, because more minibatches in flight make weights older.
TOLERANCE = 0.01
SEARCH = "search"


@dataclass(frozen=True)
class Candidate:
    """One rule of allocation with one placement.

    Attributes:
        rule: "NP", "ED", "HD" or "search".
        best: prediction with the best N_m; None if the candidate is not possible.
        problem: reason why it is not possible.
        by_in_flight: (N_m, samples per second) for each N_m that was tried and fits.
        answer: result of the search at the best N_m.
    """

    rule: str
    placement_name: str
    best: Prediction | None
    problem: str = ""
    by_in_flight: tuple[tuple[int, float], ...] = ()
    answer: Found | None = None


@dataclass(frozen=True)
class FleetPlan:
    """All candidates for a fleet."""

    profile: Profile
    fleet: tuple[Device, ...]
    k: int
    clock_distance: int
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Prediction | None:
        """The candidate with the most samples per second; None if the model fits in no way."""
        possible = [candidate.best for candidate in self.candidates if candidate.best is not None]
        return max(possible, key=lambda prediction: prediction.samples_per_s, default=None)


def plan_fleet(
    profile: Profile, fleet: Sequence[Device], network: Network, memory: MemoryRule | Callable[[int], MemoryRule], *,
    k: int, clock_distance: int = 0, in_flight: int | None = None, max_in_flight: int | None = None,
    rules: Sequence[str] = (*RULES, SEARCH),
) -> FleetPlan:  # fmt: skip
    """Compare the rules of allocation for virtual workers of k devices.

    Args:
        profile, fleet, network: costs of the layers, devices and links.
        memory: rule for the memory of a stage, or a function that returns the rule for each N_m.
        k: number of devices of a virtual worker.
        clock_distance: D.
        in_flight: N_m; None: the best one for each candidate.
        max_in_flight: largest N_m to try; None: 2k, more than a pipeline of k stages can use.
        rules: rules to compare.

    Raises:
        ConfigError: there are fewer than k devices, or more stages than layers.
    """
    if not 1 <= k <= len(fleet):
        raise ConfigError(f"expected 1 to {len(fleet)} devices per virtual worker, the fleet's number, got {k}")
    if k > len(profile.layers):
        raise ConfigError(f"expected {len(profile.layers)} devices per virtual worker at most, one per layer, got {k}")
    tried = [in_flight] if in_flight else list(range(1, (max_in_flight or 2 * k) + 1))
    rates = {n: GroupRates(profile, network, memory(n) if callable(memory) else memory, n) for n in tried}
    planner = _Planner(profile, tuple(fleet), network, k, clock_distance, rates)
    candidates = [candidate for rule in rules for candidate in planner.candidates(rule)]
    return FleetPlan(profile, tuple(fleet), k, clock_distance, tuple(candidates))


@dataclass
class _Planner:
    """The state of a plan. `rates`: by N_m, for each tried N_m. `max_steps` and `before`: for the next search."""

    profile: Profile
    fleet: tuple[Device, ...]
    network: Network
    k: int
    clock_distance: int
    rates: dict[int, GroupRates]
    max_steps: int = MAX_STEPS
    before: tuple[Grouping, ...] = ()

    def candidates(self, rule: str) -> list[Candidate]:
        """Return the candidates of a rule, one for each placement that it allows."""
        made: dict[str, list[tuple[Prediction, Found | None]]] = {"default": [], "local": []}
        problem = ""
        for in_flight in self.rates:
            try:
                groupings, answer = self._groupings(rule, in_flight)
            except (ConfigError, DoesNotFitError) as error:
                problem = str(error)
                break
            for name, predictions in made.items():
                possible = [self._predict(rule, name, groups, in_flight) for groups in groupings]
                best = max(filter(None, possible), key=lambda each: each.samples_per_s, default=None)
                if best is not None:
                    predictions.append((best, answer))
        if len({device.node for device in self.fleet}) == 1:  # all placements are equal
            del made["local"]
        candidates = [_candidate(rule, name, predictions) for name, predictions in made.items() if predictions]
        return candidates or [Candidate(rule, "default", None, problem)]

    def _groupings(self, rule: str, in_flight: int) -> tuple[list[Grouping], Found | None]:
        """Return the single grouping of a rule of the paper. For the search, return its grouping and those of the
        rules, which may have less traffic."""
        rates = self.rates[in_flight]
        if rule != SEARCH:
            groups = RULES[rule](self.fleet, self.k)
            for group in groups:
                rates.worker(group)  # raises DoesNotFitError
            return [groups], None
        by_rules: list[Grouping] = []
        for by_rule in RULES.values():
            with suppress(ConfigError):
                by_rules.append(by_rule(self.fleet, self.k))
        answer = search(self.fleet, self.k, rates, starts=(*by_rules, *self.before), max_steps=self.max_steps)
        if not answer.is_exact:  # a search with another N_m will not be exact either, so continue from this answer
            self.max_steps = 0
            self.before = (answer.groups,) if answer.groups else ()
        if not answer.groups:
            # The devices with the most memory show best what does not fit.
            rates.worker(sorted(self.fleet, key=lambda device: -device.memory_bytes)[: self.k])
            raise ConfigError("expected that the model fits on a group of devices, got none on which it does")
        return [answer.groups, *by_rules], answer

    def _predict(self, rule: str, name: str, groups: Grouping, in_flight: int) -> Prediction | None:
        """Return the prediction; None if the model does not fit, or if this placement is not possible."""
        try:
            workers = [self.rates[in_flight].worker(group) for group in groups]
            partitions = [worker.partition for worker in workers]
            placement = (
                local_placement(partitions) if name == "local"
                else default_placement(len(self.profile.layers), sorted({device.node for device in self.fleet}))
            )  # fmt: skip
        except (ConfigError, DoesNotFitError):
            return None
        spare = list(self.fleet)
        for worker in workers:
            for device in worker.devices:
                spare.remove(device)
        load = traffic(self.profile, partitions, placement)
        sync_s = load.sync_s(self.network)
        rates = rates_in_waves(workers, in_flight, self.clock_distance, sync_s)
        return Prediction(
            rule, name, placement, tuple(workers), in_flight, rates, load, *load.pace_bound(self.network, in_flight),
            sync_s, self.profile.batch_size, tuple(spare),
        )  # fmt: skip


def _candidate(rule: str, name: str, made: Sequence[tuple[Prediction, Found | None]]) -> Candidate:
    most = max(prediction.samples_per_s for prediction, _ in made)
    best, answer = next(pair for pair in made if pair[0].samples_per_s >= (1.0 - TOLERANCE) * most)
    return Candidate(rule, name, best, "", tuple((each.in_flight, each.samples_per_s) for each, _ in made), answer)
