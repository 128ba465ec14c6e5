"""The fastest fate that fits: what `--offload auto` does.

In: a model, a cluster and settings. Out: the plan that the chosen settings make, with the prices of all that were
tried. Each setting of `--offload` is tried with each of `--recompute`, or with the one that is given. All passes plan
it; the simulator says its seconds, and the count of its memory whether it fits. Where everything fits as it is, and
memory without limit would make nothing faster, nothing else is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory
from penstock.passes.memory.recompute import MODES
from penstock.planning.model import Model
from penstock.planning.options import AUTO, OFFLOADS, PlanOptions
from penstock.planning.pipeline import PreparedModel, plan_model, prepare
from penstock.planning.plan import Plan
from penstock.planning.watching import SILENT, Feedback
from penstock.support.errors import DoesNotFit, UsageError, VerifyError
from penstock.support.words import itemised

from .prices import FatePrice, FatePrices

_DEFAULTS = PlanOptions(offload=AUTO)
# Plans whose steps differ by a smaller part are as fast: the one that moves less is taken.
_SAME = 5e-4
# The bytes of a device that everything fits on, which has a limit all the same, as moves depend on that.
_ENDLESS = 1 << 60
# Kinds that move all that others move: what is refused of these is refused of them. What is refused because all of it
# is made again may not be, where something else makes room.
_PARTS = {"both": ("state", "activations"), "all": ("weights",)}


def plan_within_memory(
    model: Model,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = _DEFAULTS,
    feedback: Feedback = SILENT,
) -> Plan:
    """Plan a training with what is elsewhere or computed again chosen by price."""
    if training is None:
        raise UsageError("--offload moves what a training holds", hint="compile with --loss")
    return _Trials(model, cluster, training, options, feedback).plan()


@dataclass(frozen=True)
class _Trials:
    """The trials of all settings for one model."""

    model: Model
    cluster: Cluster
    training: Training
    options: PlanOptions
    feedback: Feedback

    def plan(self) -> Plan:
        """Return the fastest plan that fits; DoesNotFit with the least that each kind needs, where none does."""
        kept = replace(self.options, offload="none", spill="")
        head = PreparedModel(prepare(self.model, self.cluster, kept, self.training), ())
        limits = {device.name: device.memory for device in self.cluster.devices if device.memory}
        unlimited = replace(self.cluster, devices=tuple(replace(d, spaces=()) for d in self.cluster.devices))
        free = self._made(replace(kept, recompute="none"), head, unlimited)
        prices, plans = FatePrices(limits, _price_of(free, "none", "none"), ()), dict[int, Plan]()
        for options in self._settings():
            parts = _PARTS.get(options.offload, ())
            if any(p.refused and p.offload in parts and p.recompute == "none" for p in prices.tried):
                continue
            price, plan = self._tried(options, head)
            prices = replace(prices, tried=(*prices.tried, price))
            if plan is not None:
                plans[len(prices.tried) - 1] = plan
            if price.step is not None and price.offload == "none" and price.step <= prices.seconds_free * (1 + _SAME):
                break
        if not plans:
            raise _nothing_fits(prices)
        least = min(plan.predicted.step for plan in plans.values())
        place = next(i for i, plan in plans.items() if plan.predicted.step <= least * (1 + _SAME))
        prices = replace(prices, chosen=prices.tried[place])
        return replace(self._shown(prices.tried[place], plans[place]), prices=prices)

    def _settings(self) -> Iterator[PlanOptions]:
        """Yield the settings to try, those that move nothing first."""
        modes = MODES if self.options.recompute == AUTO else (self.options.recompute,)
        for kind in OFFLOADS:
            spill = "" if kind == "none" else self.options.spill
            for mode in sorted(modes, key=("none", "auto", "all").index):
                yield replace(self.options, offload=kind, recompute=mode, spill=spill)

    def _tried(self, options: PlanOptions, head: PreparedModel) -> tuple[FatePrice, Plan | None]:
        """Return the price of a setting, and the plan where it fits."""
        offload, mode = options.offload, options.recompute
        try:
            plan = self._made(options, head, self.cluster)
        except DoesNotFit as error:
            needs, reason = error.needs, "" if error.needs else _first_line(error.what)
            if needs and (reason := self._without_room(options, head)):
                needs = {}
            return FatePrice(offload, mode, None, needs, again=mode != "none", refused=reason), None
        except (UsageError, VerifyError) as error:
            if offload == "none":
                raise
            return FatePrice(offload, mode, None, {}, again=mode != "none", refused=_first_line(error.what)), None
        return _price_of(plan, offload, mode), plan

    def _without_room(self, options: PlanOptions, head: PreparedModel) -> str:
        """Return why a setting would fit no device of any memory: spaces have too little room for what it moves. It is
        empty where they have enough."""
        if options.offload == "none" or not _has_limited_spaces(self.cluster):
            return ""
        endless = [
            replace(d, spaces=((d.spaces[0][0], _ENDLESS), *d.spaces[1:])) if d.spaces else d
            for d in self.cluster.devices
        ]
        try:
            self._made(options, head, replace(self.cluster, devices=tuple(endless)))
        except DoesNotFit as error:
            return _first_line(error.what)
        return ""

    def _made(self, options: PlanOptions, head: PreparedModel, cluster: Cluster) -> Plan:
        name = f"--offload {options.offload}, --recompute {options.recompute}"
        return plan_model(self.model, cluster, self.training, options, self.feedback.of_trial(name), head)

    def _shown(self, price: FatePrice, plan: Plan) -> Plan:
        """Return the chosen plan, made once more where passes are watched."""
        if self.feedback.watcher is None:
            return plan
        spill = "" if price.offload == "none" else self.options.spill
        options = replace(self.options, offload=price.offload, recompute=price.recompute, spill=spill)
        return plan_model(self.model, self.cluster, self.training, options, self.feedback)


def _has_limited_spaces(cluster: Cluster) -> bool:
    return any(space.bytes for space in cluster.spaces) or any(d.spaces[1:] for d in cluster.devices)


def _price_of(plan: Plan, offload: str, mode: str) -> FatePrice:
    again = any(note.origin == "recompute" for note in plan.module.notes)
    return FatePrice(offload, mode, plan.predicted.step, needs_of(plan.module), again)


def needs_of(module: Module) -> dict[str, int]:
    """Return the bytes of each device of a program at the worst moment, with what is taken of the device beside."""
    needs, devices = Counter[str](), module.rank_devices()
    for rank, memory in measure_memory(module).items():
        libraries = 0 if module.cluster is None else module.cluster.device(devices[rank]).taken
        needs[devices[rank]] += memory.peak + libraries
    return dict(needs)


def _nothing_fits(prices: FatePrices) -> DoesNotFit:
    what = f"no plan fits into memory, whatever is moved or computed again:{itemised(prices.shortages(set()))}"
    hint = "more stages, fewer microbatches in flight or smaller microbatches (--dim) need less"
    return DoesNotFit(what, where="--offload auto", hint=hint, needs=prices.least_needs())


def _first_line(text: str) -> str:
    return text.splitlines()[0]
