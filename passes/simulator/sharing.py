"""Links and NICs that simulated messages share.

In: tasks, each with work to do and the resources it uses meanwhile. Out: the end of each, as events on the
simulation's heap.

A task goes on at a rate of at most `cap` per second. It takes `demand` of every resource it uses for each unit of
its rate. Resources are divided by max-min fairness. The rates of all tasks rise together until a resource is used up or
a task is at its cap. These stay as they are, and the others rise on. The rate is bytes per second; a ring demands a
link for each time that it goes through it.

Rates change only when a task begins or ends, and only among tasks that are connected through resources that they
share. Those alone are computed anew, once for all that happens at one moment. Cost: the number of uses of resources in
the connected part, times a logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

Push = Callable[[float, "Task", int], None]


@dataclass(slots=True, eq=False)
class Resource:
    """A resource that tasks share. `busy` are the seconds in which some task used it, `moved` the units that went
    through."""

    name: str
    capacity: float
    tasks: dict[int, Task] = field(default_factory=dict)
    busy: float = 0.0
    moved: float = 0.0
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """Work under way; `done` is called at its end. `stamp` marks the one end that still holds."""

    number: int
    left: float
    cap: float
    demands: Sequence[tuple[Resource, float]]
    done: Callable[[float], None]
    rate: float = 0.0
    at: float = 0.0
    stamp: int = 0


class Sharing:
    """All tasks under way. `push(time, task, stamp)` puts an end onto the heap. The owner of the heap calls `end` when
    its time comes. It calls `settle` when it has done all that happens at one moment and before it goes on to the next.
    So rates are computed once for all changes of a moment."""

    def __init__(self, push: Push) -> None:
        self._push = push
        self._number = 0
        self._fresh: list[Task] = []
        self._touched: dict[Resource, None] = {}

    @property
    def unsettled(self) -> bool:
        return bool(self._fresh or self._touched)

    def begin(
        self,
        now: float,
        work: float,
        demands: Sequence[tuple[Resource, float]],
        done: Callable[[float], None],
        *,
        cap: float,
    ) -> None:
        """Start a task with `work` > 0 units to do."""
        self._number += 1
        task = Task(self._number, work, cap, demands, done, at=now)
        for resource, demand in demands:
            if not resource.tasks:
                resource.since = now
            resource.tasks[task.number] = task
            resource.moved += work * demand
            self._touched[resource] = None
        self._fresh.append(task)

    def end(self, now: float, task: Task, stamp: int) -> None:
        """Handle an end that was pushed; one that does not hold is passed over."""
        if stamp != task.stamp:
            return
        for resource, _ in task.demands:
            del resource.tasks[task.number]
            if not resource.tasks:
                resource.busy += now - resource.since
            self._touched[resource] = None
        task.done(now)

    def settle(self, now: float) -> None:
        """Push new rates for all that is connected with the changes, and new ends where a rate is another one."""
        part = {task.number: task for task in self._fresh}
        reached = self._touched
        open_ = list(reached)
        self._fresh, self._touched = [], {}
        while open_:
            for number, task in open_.pop().tasks.items():
                if number not in part:
                    part[number] = task
                    for resource, _ in task.demands:
                        if resource not in reached:
                            reached[resource] = None
                            open_.append(resource)
        rates = fair_rates(part.values()) if len(part) > 1 else {n: _alone(task) for n, task in part.items()}
        for number, task in part.items():
            rate = rates[number]
            if rate != task.rate:
                task.left = max(0.0, task.left - task.rate * (now - task.at))
                task.at, task.rate = now, rate
                task.stamp += 1
                self._push(now + task.left / rate, task, task.stamp)


def _alone(task: Task) -> float:
    """Return the rate of a task that shares nothing."""
    return min([task.cap, *(resource.capacity / demand for resource, demand in task.demands)])


@dataclass(slots=True)
class _Filling:
    """A resource while rates are computed: the free part, how much of it the growing tasks take for each level, and how
    many those are."""

    free: float
    pull: float = 0.0
    growing: int = 0


def fair_rates(tasks: Iterable[Task]) -> dict[int, float]:
    """Return max-min fair rates of tasks that share resources with no other task. The next level is the lowest at which
    a task is at its cap, or a resource is used up. A resource's own level only rises when tasks that use it stop
    earlier. So an old entry of the heap is at most too low."""
    listed = sorted(tasks, key=lambda task: task.number)
    state: dict[Resource, _Filling] = {}
    for task in listed:
        for resource, demand in task.demands:
            filling = state.setdefault(resource, _Filling(resource.capacity))
            filling.pull += demand
            filling.growing += 1
    order = {resource: number for number, resource in enumerate(state)}
    heap = [(filling.free / filling.pull, order[resource], resource) for resource, filling in state.items()]
    heapify(heap)
    capped = sorted(listed, key=lambda task: (task.cap, task.number), reverse=True)
    rates: dict[int, float] = {}
    level = 0.0

    def stop(task: Task) -> None:
        rates[task.number] = level
        for resource, demand in task.demands:
            filling = state[resource]
            filling.growing -= 1
            filling.free = max(0.0, filling.free - demand * rates[task.number])
            filling.pull -= demand

    while len(rates) < len(listed):
        while capped and capped[-1].number in rates:
            capped.pop()
        first = capped[-1].cap
        if heap and heap[0][0] < first:
            _, number, resource = heappop(heap)
            filling = state[resource]
            if not filling.growing:
                continue
            reach = filling.free / filling.pull
            if reach > min(first, heap[0][0] if heap else first):
                heappush(heap, (reach, number, resource))
                continue
            level = max(level, reach)
            for key, task in resource.tasks.items():
                if key not in rates:
                    stop(task)
        else:
            level = max(level, first)
            stop(capped.pop())
    return rates
