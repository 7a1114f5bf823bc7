"""A third judge: it plays a lowered schedule with real values; and makers of lowered schedules, right and wrong.

Every result is a value (what, stage, microbatch). A SEND puts its value at the end of the queue between two ranks, a
RECV takes what is at the head, and an action starts when its values are on its rank. Nothing here comes from
`ppedu.core.check` or `lower`: a schedule is drawn by playing, too.
"""

from collections import Counter, defaultdict

from stepper import paired

from ppedu import Action, B, F, I, Op, Placement, Schedule, W

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def needs(single, stages):
    """The values that a compute action starts from."""
    stage, op, m = single[:3]
    if op == "F":
        return [("activation", stage - 1, m)] if stage > 0 else []
    if op == "W":
        return [("half", stage, m)]
    return [("kept", stage, m), *([("gradient", stage + 1, m)] if stage < stages - 1 else [])]


def gives(single):
    """The values that a compute action makes. The gradient of a stage is that of the stage's input."""
    stage, op, m = single[:3]
    made = {"F": ("activation", "kept"), "B": ("gradient",), "I": ("gradient", "half"), "W": ()}
    return [(what, stage, m) for what in made[op]]


def message(action):
    """The value that a SEND or RECV names, and the stages that it goes from and to."""
    stage, op, m = action[:3]
    what, step = ("activation", 1) if op in ("SEND_F", "RECV_F") else ("gradient", -1)
    source = stage if op in ("SEND_F", "SEND_B") else stage - step
    return (what, source, m), source, source + step


def ends(action, placement):
    """The ranks that a SEND or RECV goes from and to."""
    _, source, target = message(action)
    return placement.rank(source, action.microbatch), placement.rank(target, action.microbatch)


def is_lowered(schedule):
    return any(action.op in MESSAGES for order in schedule.orders for action in order)


def wanted_messages(schedule, rank):
    """The SENDs and RECVs that the rank has to run, in no particular order."""
    wanted = []
    for m in range(schedule.microbatches):
        holder = [schedule.placement.rank(stage, m) for stage in range(schedule.stages)]
        for stage in range(schedule.stages - 1):
            if holder[stage] != holder[stage + 1]:
                if holder[stage] == rank:
                    wanted += [Action(stage, Op.SEND_F, m), Action(stage, Op.RECV_B, m)]
                if holder[stage + 1] == rank:
                    wanted += [Action(stage + 1, Op.RECV_F, m), Action(stage + 1, Op.SEND_B, m)]
    return wanted


def incomplete(schedule, rank):
    """Does the rank run or send anything that it should not, or not run or send what it should?"""
    order = schedule.orders[rank]
    left = Counter(single for action in order for single in action.singles if single.op not in SHARDING)
    if is_lowered(schedule):
        left.subtract(wanted_messages(schedule, rank))
    for m in range(schedule.microbatches):
        for stage in range(schedule.stages):
            if schedule.placement.rank(stage, m) == rank:
                halves = (I, W) if left[I(stage, m)] or left[W(stage, m)] else (B,)
                left.subtract([make(stage, m) for make in (F, *halves)])
    return any(left.values())


def sharded_wrongly(schedule, rank):
    order = schedule.orders[rank]
    held = {stage for copy in schedule.placement.holders for stage, holder in enumerate(copy) if holder == rank}
    guarded = any(action.op in ("UNSHARD", "RESHARD") for action in order)
    gathered, summed = set(), set()
    for action in order:
        if action.op in SHARDING:
            if action.stage not in held or (action.op == "REDUCE_GRAD" and action.stage in summed):
                return True
            if action.op == "REDUCE_GRAD":
                summed.add(action.stage)
            elif (action.op == "UNSHARD") == (action.stage in gathered):
                return True
            else:
                gathered ^= {action.stage}
        elif action.op not in MESSAGES:
            stages = {single.stage for single in action.singles}
            if stages & summed or (guarded and stages - gathered):
                return True
    return False


def legal(schedule, ranks=None, rendezvous=False):
    """The verdict that `ppedu.check` should come to."""
    judged = range(schedule.ranks) if ranks is None else ranks
    if any(incomplete(schedule, rank) or sharded_wrongly(schedule, rank) for rank in judged):
        return False
    return plays(schedule, judged, rendezvous)


def plays(schedule, judged, rendezvous):
    """Do all the judged ranks get to their end, each receive with the value that it names?"""
    lowered = is_lowered(schedule)
    left = {rank: list(schedule.orders[rank]) for rank in judged}
    here = {rank: set() for rank in judged}
    queues = defaultdict(list)

    def there(value, rank):
        what, stage, m = value
        maker = schedule.placement.rank(stage, m)
        if lowered or what in ("kept", "half"):
            return value in here[rank]
        return maker not in here or value in here[maker]

    def step(rank):
        action = left[rank][0]
        if action.op in SHARDING:
            pass
        elif action.op in MESSAGES:
            value = message(action)[0]
            source, target = ends(action, schedule.placement)
            if action.op in ("RECV_F", "RECV_B"):
                if source in left:
                    if not queues[source, rank]:
                        return False
                    if queues[source, rank].pop(0) != value:
                        raise _WrongMessageError
                here[rank].add(value)
            else:
                if value not in here[rank]:
                    return False
                if target in left:
                    if rendezvous and not waits_for(target, rank):
                        return False
                    queues[rank, target].append(value)
        else:
            if not all(there(value, rank) for single in action.singles for value in needs(single, schedule.stages)):
                return False
            here[rank].update(value for single in action.singles for value in gives(single))
        del left[rank][0]
        return True

    def waits_for(target, source):
        """Has the target come to the receive of the source's next message?"""
        if queues[source, target] or not left[target] or left[target][0].op not in ("RECV_F", "RECV_B"):
            return False
        return ends(left[target][0], schedule.placement)[0] == source

    try:
        while any(step(rank) for rank in judged if left[rank]):
            pass
    except _WrongMessageError:
        return False
    return not any(left.values())


class _WrongMessageError(Exception):
    pass


def clock(schedule, length, latency):
    """`rows[rank]` as [(action, start, end)] of a legal schedule, guessed again and again until the guess stays.

    A message travels for `latency` and takes no rank's time; nor does the posting of a receive.
    """
    lowered = is_lowered(schedule)
    known, rows = {}, None  # when a value is where: (value, rank) -> time; sent messages have no rank
    while True:
        before, rows = rows, [[] for _ in schedule.orders]
        for rank, order in enumerate(schedule.orders):
            free = 0
            for action in order:
                start = free
                if action.op in ("RECV_F", "RECV_B"):
                    value = message(action)[0]
                    known[value, rank] = known.get((value, None), 0) + latency
                elif action.op in ("SEND_F", "SEND_B"):
                    known[message(action)[0], None] = start
                elif action.op not in SHARDING:
                    for single in action.singles:
                        for value in needs(single, schedule.stages):
                            maker = schedule.placement.rank(value[1], value[2])
                            late = latency if maker != rank and not lowered else 0
                            where = rank if lowered else maker
                            start = max(start, known.get((value, where), 0) + late)
                    free = start + length(action)
                    known.update({(value, rank): free for single in action.singles for value in gives(single)})
                rows[rank].append((action, start, free))
        if rows == before:
            return rows


# --- makers -----------------------------------------------------------------------------------------------------


def draw_placement(random, microbatches, most_ranks=4):
    """One of every kind, and maps that no one would think of."""
    ranks = random.randint(1, most_ranks)
    name = random.choice(["loop", "v", "bidirectional", "custom", "two"])
    if name in ("custom", "two"):
        holders = [*range(ranks), *(random.randrange(ranks) for _ in range(random.randrange(4)))]
        copies = [tuple(random.sample(holders, len(holders))) for _ in range(1 + (name == "two"))]
        return Placement(name, ranks, tuple(copies), random.randint(0, microbatches))
    chunks = 1 if name == "bidirectional" else random.randint(1, 3)
    return Placement.make(name, ranks, chunks, microbatches)


def draw(random, lowered=True, together=False, sharded=False, most_ranks=4, most_microbatches=3, placement=None):
    """A legal schedule, from a play in which the ranks' steps come at random.

    With `together` a message is received as it is sent, so that sends may block.
    """
    microbatches = random.randint(1, most_microbatches)
    placement = placement or draw_placement(random, microbatches, most_ranks)
    split, pairs = random.choice([0, 0.5, 1]), random.choice([0, 0, 0.4])
    orders = [[] for _ in range(placement.ranks)]
    here = [set() for _ in orders]
    queues = defaultdict(list)
    work, sends = [], []
    for m in range(microbatches):
        for stage in range(placement.stages):
            halves = (I, W) if random.random() < split else (B,)
            work += [make(stage, m) for make in (F, *halves)]
    if lowered:
        empty = Schedule("empty", placement, microbatches, tuple(() for _ in orders))
        sends = [each for rank in range(placement.ranks) for each in wanted_messages(empty, rank) if "SEND" in each.op]

    def rank_of(action):
        return placement.rank(action.stage, action.microbatch)

    def deliver(source, target):
        action = queues[source, target].pop(0)
        value, _, to = message(action)
        orders[target].append(Action(to, Op.RECV_F if action.op == "SEND_F" else Op.RECV_B, action.microbatch))
        here[target].add(value)

    def ready(action):
        values = needs(action, placement.stages)
        return all(value in here[rank_of(action)] for value in values) if lowered else set(values) <= set().union(*here)

    while work or sends or any(queues.values()):
        choices = [("run", each) for each in work if ready(each)]
        choices += [("send", each) for each in sends if message(each)[0] in here[rank_of(each)]]
        choices += [("deliver", route) for route, queue in queues.items() if queue]
        what, each = random.choice(choices)
        if what == "deliver":
            deliver(*each)
        elif what == "send":
            sends.remove(each)
            orders[rank_of(each)].append(each)
            queues[ends(each, placement)].append(each)
            if together:
                deliver(*ends(each, placement))
        else:
            rank, run = rank_of(each), [each]
            partners = [other for other in work if paired(each, other) and rank_of(other) == rank and ready(other)]
            if partners and random.random() < pairs:
                run.append(random.choice(partners))
            for single in run:
                work.remove(single)
            orders[rank].append(run[0] if len(run) == 1 else paired(*run))
            here[rank].update(value for single in run for value in gives(single))
    if sharded:
        orders = [shard(random, order) for order in orders]
    return Schedule("drawn", placement, microbatches, tuple(map(tuple, orders)))


def shard(random, order):
    """The order with each stage gathered some time before it is computed with, and freed some time after."""
    out, gathered = [], []
    left = Counter(single.stage for action in order for single in action.singles if single.op in COMPUTE)
    for action in order:
        stages = {single.stage for single in action.singles if single.op in COMPUTE}
        for stage in [stage for stage in gathered if stage not in stages and random.random() < 0.3]:
            gathered.remove(stage)
            out.append(Action(stage, Op.RESHARD))
        early = {stage for stage in left if left[stage] and random.random() < 0.1}
        for stage in sorted((stages | early) - set(gathered)):
            gathered.append(stage)
            out.append(Action(stage, Op.UNSHARD))
        out.append(action)
        left.subtract(single.stage for single in action.singles if single.op in COMPUTE)
        out += [Action(stage, Op.REDUCE_GRAD) for stage in stages if not left[stage]]
    return out


MUTATIONS = (
    *("drop", "double", "swap", "neighbours", "move", "receives", "sends", "renumber", "restage", "delay", "hurry"),
    *("fuse", "unfuse", "insert", "flip"),
)


def mutate(random, schedule, changes=None):
    """The schedule with one to three things changed. Often, but not always, it is legal no more."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(changes or random.choice([1, 1, 1, 2, 3])):
        _change(random, schedule, orders, random.choice(MUTATIONS))
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(map(tuple, orders)))


def _change(random, schedule, orders, mutation):
    order = random.choice([order for order in orders if order])
    index = random.randrange(len(order))
    action = order[index]

    def places(*ops):
        return [index for index, action in enumerate(order) if action.op in ops]

    def exchange(*ops):
        spots = places(*ops)
        if len(spots) > 1:
            here, there = random.sample(spots, 2)
            order[here], order[there] = order[there], order[here]

    def shift(ops, where):
        if spots := places(*ops):
            spot = random.choice(spots)
            order.insert(where(spot), order.pop(spot))

    if mutation == "drop" and sum(map(len, orders)) > 1:
        del order[index]
    elif mutation == "double":
        order.insert(random.randint(0, len(order)), action)
    elif mutation == "swap":
        exchange(*{action.op for action in order})
    elif mutation == "neighbours":
        order[index : index + 2] = order[index : index + 2][::-1]
    elif mutation == "move" and len(order) > 1:
        other = random.choice(orders)
        other.insert(random.randint(0, len(other)), order.pop(index))
    elif mutation == "receives":
        exchange("RECV_F", "RECV_B")
    elif mutation == "sends":
        exchange("SEND_F", "SEND_B")
    elif mutation in ("renumber", "restage"):
        spots = places("RECV_F", "RECV_B") if random.random() < 0.5 else places(*MESSAGES, *COMPUTE)
        if spots:
            field, most = (
                ("microbatch", schedule.microbatches) if mutation == "renumber" else ("stage", schedule.stages)
            )
            spot = random.choice(spots)
            order[spot] = order[spot]._replace(**{field: random.randint(-1, most)})
    elif mutation == "delay":
        shift(("SEND_F", "SEND_B"), lambda spot: random.randint(spot, len(order) - 1))
    elif mutation == "hurry":
        shift(("RECV_F", "RECV_B"), lambda spot: random.randint(0, spot))
    elif mutation == "fuse" and index + 1 < len(order) and paired(action, order[index + 1]):
        order[index : index + 2] = [paired(action, order[index + 1])]
    elif mutation == "unfuse":
        order[index : index + 1] = random.choice([action.singles, action.singles[::-1]])
    elif mutation == "insert":
        stage, m = random.randrange(schedule.stages), random.randrange(schedule.microbatches)
        op = random.choice([Op(op) for op in (*COMPUTE, *MESSAGES, *SHARDING)])
        order.insert(random.randint(0, len(order)), Action(stage, op, -1 if op in SHARDING else m))
    elif mutation == "flip" and not action.parts:
        ops = next(ops for ops in (COMPUTE, MESSAGES, SHARDING) if action.op in ops)
        order[index] = action._replace(op=Op(random.choice(ops)))
