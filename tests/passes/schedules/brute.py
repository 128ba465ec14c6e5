"""The oracle of schedules: an executor with real slots, queues and held values, and the recurrence it must reproduce."""

from __future__ import annotations

from collections import deque


class Wrong(Exception):
    """The program cannot be executed as written."""


class Terms:
    """Symbolic numbers: equal terms have equal ids, so results compare without being expanded."""

    def __init__(self):
        self.ids = {}

    def __call__(self, *parts):
        return self.ids.setdefault(parts, len(self.ids))


TERMS = Terms()


def _peers(module, phase):
    into = {s.index: sorted(e.src for e in module.edges if (e.dst, e.phase) == (s.index, phase)) for s in module.stages}
    out = {s.index: sorted(e.dst for e in module.edges if (e.src, e.phase) == (s.index, phase)) for s in module.stages}
    return into, out


def _forward(stage, mb, weights, received):
    return TERMS("F", stage, mb, weights, tuple(received))


def _backward(stage, kept, weights, received):
    return TERMS("B", stage, kept, weights, tuple(received))


def _update(stage, weights, gradients):
    return TERMS("U", stage, weights, tuple(sorted(gradients)))


def _initial(module, first, delay):
    """Weights before batch `first`: opaque history, so that a run may start anywhere."""
    return {
        s.index: {v: TERMS("W", s.index, v) for v in range(max(0, first - delay), first + 1)} for s in module.stages
    }


def recurrence(module, first, batches, delay):
    """W(t+1) = U(W(t), sum of gradients at W(max(t - delay, 0))), microbatch after microbatch in one place."""
    m = module.schedule.microbatches
    into = {phase: _peers(module, phase)[0] for phase in "FB"}
    weights = _initial(module, first, delay)
    losses = {}
    for t in range(first, first + batches):
        version = max(t - delay, 0)
        sums = {s: [] for s in weights}
        for mb in range(t * m, (t + 1) * m):
            f, b = {}, {}
            for s in sorted(weights):
                f[s] = _forward(s, mb, weights[s][version], [f[p] for p in into["F"][s]])
            for s in sorted(weights, reverse=True):
                b[s] = _backward(s, f[s], weights[s][version], [b[p] for p in into["B"][s]])
                sums[s].append(b[s])
            losses[mb] = f[max(f)]
        for s in weights:
            weights[s][t + 1] = _update(s, weights[s][t], sums[s])
    return {s: weights[s][first + batches] for s in weights}, losses


def run(module, first, batches):
    """Execute the ranks' programs with first-in-first-out channels; returns the last weights and all losses, or raises Wrong."""
    programs = {r: deque(a) for r, a in module.schedule.expand_all(batches, first).items()}
    stages = [s.index for s in module.stages]
    slots = {s: module.vars[f"w{s}"].versions for s in stages}
    start = _initial(module, first, 1)
    buffers = {s: {v % slots[s]: term for v, term in start[s].items()} for s in stages}
    newest = dict.fromkeys(stages, first)
    channels, inbox, outbox, kept, sums, losses = {}, {}, {}, {}, {s: [] for s in stages}, {}
    peers = {phase: _peers(module, phase) for phase in "FB"}
    done = set()
    apart = {s for s in stages if module.stage_graph(s, "W")}
    waiting = {}

    def step(a):
        """Run one action; False when it has to wait."""
        s, mb = a.stage, a.mb
        if a.kind in ("SF", "SB"):
            phase = a.kind[1]
            if (phase, s, mb) not in outbox or a.peer not in peers[phase][1][s]:
                raise Wrong(f"{a} sends nothing")
            channels.setdefault((s, a.peer), deque()).append((phase, mb, outbox[phase, s, mb]))
        elif a.kind in ("RF", "RB"):
            queue = channels.get((a.peer, s))
            if not queue:
                return False
            phase, number, term = queue.popleft()
            if (phase, number) != (a.kind[1], mb) or (phase, s, mb, a.peer) in inbox:
                raise Wrong(f"{a} got {phase}{number}")
            inbox[phase, s, mb, a.peer] = term
        elif a.kind in ("F", "B"):
            if (a.kind, s, mb) in done or a.version is None:
                raise Wrong(f"{a} twice, or without version")
            done.add((a.kind, s, mb))
            try:
                received = [inbox.pop((a.kind, s, mb, p)) for p in peers[a.kind][0][s]]
                weights = buffers[s][a.version % slots[s]]
                if a.kind == "F":
                    term = kept[s, mb] = _forward(s, mb, weights, received)
                    if s == max(stages):
                        losses[mb] = term
                else:
                    term = _backward(s, kept[s, mb], weights, received)
                    if s in apart:
                        waiting[s, mb] = term, weights
                    else:
                        sums[s].append(term)
            except KeyError as error:
                raise Wrong(f"{a} lacks {error}") from error
            outbox[a.kind, s, mb] = term
        elif a.kind == "W":
            if a.version is None or (s, mb) not in waiting or (s, mb) not in kept:
                raise Wrong(f"{a} without version, backward or saved values")
            term, weights = waiting.pop((s, mb))
            if buffers[s].get(a.version % slots[s]) != weights:
                raise Wrong(f"{a} on other weights than the backward")
            sums[s].append(term)
        elif a.kind == "U":
            newest[s] += 1
            latest = buffers[s].get((newest[s] - 1) % slots[s])
            if a.version is None:
                raise Wrong(f"{a} without version")
            buffers[s][a.version % slots[s]] = _update(s, latest, sums[s])
            sums[s] = []
        elif a.kind == "D":
            if kept.pop((s, mb), None) is None:
                raise Wrong(f"{a} drops nothing")
            for phase in "FB":
                outbox.pop((phase, s, mb), None)
        return True

    moved = True
    while moved:
        moved = False
        for actions in programs.values():
            while actions and step(actions[0]):
                actions.popleft()
                moved = True
    if any(programs.values()):
        raise Wrong("deadlock")
    if (
        kept
        or inbox
        or waiting
        or any(channels.values())
        or any(sums.values())
        or any(n != first + batches for n in newest.values())
    ):
        raise Wrong("something is left over")
    return {s: buffers[s].get(newest[s] % slots[s]) for s in stages}, losses
