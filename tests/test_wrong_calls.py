"""A wrong argument of a public function works, or is refused quickly with an error of this package.

Each of CALLS is valid. Its arguments are replaced, one at a time, by values that may be confused with them: another
object of the package, a number of another library, text for a number, a list for a tuple, None.
"""

import inspect
import math
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest

import ppedu as pp
from ppedu import Action, Costs, Op, ParseError, Placement, Schedule, SettingError, Timeline
from ppedu.core import overlap

pyplot = pytest.importorskip("matplotlib.pyplot")
np = pytest.importorskip("numpy")

SCHEDULE = pp.schedule("1f1b", 2, 3)
LOWERED = pp.lower(SCHEDULE)
TIMELINE = pp.simulate(SCHEDULE)
PLACEMENT = Placement.make("v", 2, 2)
GRID = pp.align(SCHEDULE)
SEND = Action(0, Op.SEND_F, 0)
MODEL = pp.Model.measured([1, 2, 2, 3], activation=1, weights=1)

WRONG = [
    *[None, True, -1, 0, 1, 2.0, 2.5, math.nan, math.inf, Fraction(5, 2), 1j, 10**30],
    *[
        "",
        "4",
        "1f1b",
        "0F0",
        "loop",
        "no\0where",
        "\ud800",
        "x" * 300 + ".svg",
        b"4",
        Path("nowhere", "x.csv"),
        Path(),
    ],
    *[[], [1], (1, 2), [[]], [None], ["0F0"], {}, {1: 2}, {1}, range(2), object(), print, int],
    *[SCHEDULE, LOWERED, TIMELINE, Costs(), PLACEMENT, SCHEDULE.orders, GRID, pp.F(0, 0), SEND, Op.F, pp.F(0, None)],
    *[np.int64(2), np.float64(2.5), np.bool_(True), np.array(2), np.array([1, 2]), np.array([[0, 1]]), np.str_("loop")],
]
with suppress(ImportError):
    import torch

    WRONG += [torch.tensor(2), torch.tensor(2.5), torch.tensor([1, 2])]


def register(name, placement, chunks, generator):
    pp.register(name, placement, chunks)(generator)
    return pp.schedule("mine", 2, 2)


def costs(**given):
    return pp.simulate(SCHEDULE, Costs(**given))


def measured():
    """Return the run of a saved timeline."""
    pp.simulate(SCHEDULE, Costs(1.0)).save("run.json")
    return pp.Run.load("run.json")


# Functions, each with valid arguments.
CALLS = {
    "Action": (lambda *fields: (str(Action(*fields)), repr(Action(*fields))), 0, Op.F, 0),
    "Action.parse": (Action.parse, "0F0"),
    "Action.of": (Action.of, pp.F(0, 0)),
    **{name: (lambda *fields, name=name: str(getattr(pp, name)(*fields)), 0, 0) for name in "FBIWROLUST"},
    "overlap": (overlap, pp.F(0, 1), pp.B(0, 0)),
    "Placement": (Placement, "mine", 2, ((0, 1), (1, 0)), 1),
    "Placement.make": (Placement.make, "v", 2, 2, 3),
    "Placement.custom": (Placement.custom, [0, 1, 1, 0]),
    "Placement.rank": (PLACEMENT.rank, 1, 0),
    "Placement.chunk": (PLACEMENT.chunk, 1, 0),
    "Placement.route": (PLACEMENT.route, SEND),
    "Placement.stages_of": (PLACEMENT.stages_of, 1),
    "Schedule": (Schedule, "mine", Placement.make("loop", 2), 3, SCHEDULE.orders),
    "Schedule.problems": (lambda orders: Schedule("mine", PLACEMENT, 3, orders).problems, SCHEDULE.orders),
    "Schedule.order": (SCHEDULE.order, 1),
    "Schedule.to_csv": (SCHEDULE.to_csv, "x.csv"),
    "Schedule.from_csv": (
        lambda *given: (SCHEDULE.to_csv("y.csv"), Schedule.from_csv(*given)),
        "y.csv",
        "loop",
        3,
        "x",
    ),
    "check": (pp.check, SCHEDULE),
    "lower": (lambda schedule, receive, resident: pp.lower(schedule, receive, True, resident), SCHEDULE, "late", 2),
    "align": (pp.align, SCHEDULE),
    "strip": (pp.strip, SCHEDULE),
    "verify": (
        lambda schedule, transport, buffers, peak: pp.verify(schedule, transport=transport, buffers=buffers, peak=peak),
        SCHEDULE,
        "pair",
        2,
        [2, 2],
    ),
    "shrink": (
        lambda schedule, transport, buffers: pp.shrink(schedule, transport=transport, buffers=buffers),
        pp.Schedule("late", SCHEDULE.placement, SCHEDULE.microbatches, [order[::-1] for order in SCHEDULE.orders]),
        "pair",
        2,
    ),
    "merge_backward": (pp.merge_backward, SCHEDULE),
    "recompute": (pp.recompute, SCHEDULE, [0]),
    "share_head": (pp.share_head, SCHEDULE, 1),
    "offload": (pp.offload, SCHEDULE, 1, 2),
    "versions": (pp.versions, SCHEDULE),
    "label": (pp.label, SEND, Placement.make("loop", 2)),
    "simulate": (pp.simulate, SCHEDULE, Costs()),
    **{
        f"Costs.{name}": (lambda value, name=name: costs(**{name: value}), 1)
        for name in inspect.signature(Costs).parameters
        if name not in ("unit", "memory_unit", "recompute", "links", "lengths")
    },
    "Costs.unit": (lambda unit: str(costs(unit=unit)), "s"),
    "Costs.memory_unit": (lambda unit: str(costs(memory_unit=unit)), "GB"),
    "Costs.lengths": (lambda lengths: costs(lengths=lengths), [1]),
    "prefill": (pp.prefill, 2, 8, [5, 3], Costs()),
    "prefill, options": (
        lambda equal, prompts, decode, mixed, placement: pp.prefill(
            2, 8, 3, equal_time=equal, prompts=prompts, decode=decode, mixed=mixed, placement=placement
        ).summary(),
        *[True, 2, 1, False, "v"],
    ),
    "braid": (pp.braid, [("attention", 2)], [("all-reduce", 1, "network"), ("attention", 2)]),
    "Braid.costs": (pp.braid([("attention", 2)], [("attention", 2)]).costs, 2),
    "equal_time_slices": (pp.equal_time_slices, 8, 2, 0.5),
    "dynamic_microbatches": (
        lambda lengths, ranks, tokens: pp.dynamic_microbatches(lengths, ranks, math.hypot, tokens=tokens),
        *[[1], 2, 4],
    ),
    "order_by_clusters": (lambda times, clusters: pp.order_by_clusters(times, sum, clusters), [2, 1], 2),
    "dynapipe": (lambda *given: pp.dynapipe(*given[:3], memory=given[3]), 2, 3, None, 2),
    "Costs.transport": (lambda transport: Costs(transport=transport), "pair"),
    "check, transport": (lambda transport: pp.check(pp.lower(SCHEDULE), transport=transport), "pair"),
    "check, buffers": (lambda buffers: pp.check(SCHEDULE, buffers=buffers), 2),
    "Costs.recompute": (lambda recompute: costs(recompute=recompute), True),
    "simulate, steps": (lambda steps: pp.simulate(SCHEDULE, steps=steps), 2),
    "simulate, barrier": (lambda barrier: pp.simulate(SCHEDULE, steps=2, barrier=barrier).steps, True),
    "Schedule.forward_only": (lambda only: Schedule("x", PLACEMENT, 1, [[], []], only), True),
    "Costs.fit": (Costs.fit, TIMELINE),
    "Timeline": (lambda *given: Timeline(*given, Costs()).makespan, SCHEDULE, TIMELINE.rows),
    "Timeline.spans": (TIMELINE.spans, 1),
    "Timeline.why_idle": (TIMELINE.why_idle, 1, 0),
    "Timeline.memory": (TIMELINE.memory, 1),
    "Timeline.text": (TIMELINE.text, 80),
    "Timeline.plot": (TIMELINE.plot, None),
    "Timeline.show": (TIMELINE.show, TIMELINE),
    "Timeline.save": (TIMELINE.save, "x.json"),
    "Timeline.load": (lambda path: (TIMELINE.save("y.json"), Timeline.load(path)), "y.json"),
    "register": (register, "mine", "loop", 1, lambda rank, ranks, microbatches: [pp.F(rank, 0)]),
    "schedule": (pp.schedule, "1f1b", 2, 3),
    "schedule, chunks": (lambda chunks, group: pp.schedule("interleaved", 2, 4, chunks=chunks, group=group), 2, 2),
    "schedule, lifo": (lambda lifo: pp.schedule("gpipe", 2, 3, lifo=lifo), True),
    "schedule, memory": (lambda memory: pp.schedule("v-adaptive", 2, 3, memory=memory), 2),
    "compare": (pp.compare, "1f1b", SCHEDULE),
    "compare, sizes": (
        lambda *given: pp.compare("1f1b", ranks=given[0], microbatches=given[1], costs=given[2]),
        2,
        3,
        None,
    ),
    "differences": (pp.differences, SCHEDULE, TIMELINE, Costs()),
    "explore": (lambda *given: pp.explore(*given[:3], costs=given[3]), "1f1b", 2, 3, None),
    "puzzle": (pp.puzzle, "first"),
    "export.to_torch": (pp.export.to_torch, SCHEDULE, "x.csv"),
    "export.to_megatron": (pp.export.to_megatron, SCHEDULE),
    "export.to_zero_bubble": (pp.export.to_zero_bubble, SCHEDULE),
    "export.to_deepspeed": (pp.export.to_deepspeed, SCHEDULE),
    "partition.evenly": (pp.partition.evenly, 4, 2),
    "partition.by_cost": (pp.partition.by_cost, [1, 2, 3], 2, 0, 1),
    "partition.imbalance": (pp.partition.imbalance, [1, 2, 3], [range(2), range(2, 3)], 0, 1),
    **{
        f"theory.{name}": (getattr(pp.theory, name), "interleaved", 2, 4, Costs(), 2)
        for name in ("idle", "makespan", "span", "bubble", "overhead", "peak")
    },
    "theory.least_makespan": (pp.theory.least_makespan, 2, 3, Costs()),
    "Run.load": (lambda paths: (measured(), pp.Run.load(paths)), "run.json"),
    "Run.timeline": (lambda *given: measured().timeline(*given), 0, 0),
    "Run.only": (lambda *given: measured().only(*given), [0], [0]),
    "Run.predict": (lambda *given: str(measured().predict(*given)), "gpipe", Costs(), ([4, 4], [3, 5])),
    "Machine": (lambda *given: str(pp.Machine(*given)), 80e9, 4e14, 1e15, 1e-5, 5e10, 8, 5e-6, 4e11, 3e12, "s"),
    "Model": (lambda *given: pp.Model(*given).pieces(8), 2, 64, 8, 97, 4, 256, 8, True, "rms", "none", True, 16, True),
    "Model, experts": (
        lambda *given: pp.Model(2, 64, 8, 97, experts=given[0], active=given[1], shared=given[2]),
        4,
        2,
        1,
    ),
    "Model.pieces": (
        pp.Model(2, 64, 8, 97, flash=False).pieces,
        8,
        1,
        2,
        True,
        "selective",
        16,
        2,
        "megatron",
        "fp8",
        2,
        1,
        True,
        "deepep",
        True,
        True,
        True,
    ),
    "Model.layer_activation": (pp.Model(2, 64, 8, 97).layer_activation, 8, 2, True, "full", 2),
    "Model.measured": (
        pp.Model.measured,
        [1, 2, 3],
        [2, 4, 6],
        [1, 2, 3],
        [1, 2, 3],
        [1, 2, 3],
        [1, 2, 3],
        16,
        "ms",
        1,
        1,
        1,
    ),
    "plan": (lambda *given: str(pp.plan(*given, schedules=["1f1b"])), MODEL, pp.Machine(1000), 2, 4),
    "plan, options": (
        lambda *given: pp.plan(
            MODEL,
            pp.Machine(1000),
            2,
            4,
            sequence=given[0],
            batch=given[1],
            replicas=given[2],
            schedules=given[3],
            recompute=given[4],
            seconds=given[5],
        ),
        *[8, 1, 2, ["1f1b"], None, 1],
    ),
    "plan, partition": (
        lambda cut, zero, blocking, barrier: pp.plan(
            MODEL, pp.Machine(1000), 2, 4, partition=cut, zero=zero, blocking=blocking, barrier=barrier
        ),
        [2, 2],
        1,
        True,
        False,
    ),
    "plan, implementation": (
        lambda name, precision: pp.plan(
            "gpt2", "h100", 2, 4, sequence=8, schedules="1f1b", implementation=name, precision=precision
        ),
        "megatron",
        "fp8",
    ),
    "calibrate": (
        lambda machine, tokens: pp.calibrate(
            machine, tokens, model="gpt2", ranks=2, microbatches=4, sequence=8, schedules="1f1b", partition=[7, 7]
        ),
        "h100",
        2e4,
    ),
    "divide": (
        lambda *given: pp.divide(*given, microbatch=1, schedules="1f1b", seconds=0),
        "gpt2",
        "h100",
        2,
        4,
        64,
    ),
    "divide, options": (
        lambda tensor, context, ranks, microbatch: pp.divide(
            "gpt2", "h100", 2, 4, 64, tensor=tensor, context=context, ranks=ranks, microbatch=microbatch, seconds=0
        ),
        [1, 2],
        [1, 2],
        [1, 2],
        [1, 2],
    ),
    "plan, context": (lambda context: pp.plan("gpt2", "h100", 2, 4, sequence=8, context=context, schedules="1f1b"), 2),
    "plan, tensor": (lambda tensor: pp.plan("gpt2", "h100", 2, 4, sequence=8, tensor=tensor, schedules="1f1b"), 2),
    "compare, model": (
        lambda *given: pp.compare("1f1b", ranks=2, model=given[0], machine=given[1]),
        MODEL,
        pp.Machine(1),
    ),
    "explore, model": (lambda model: pp.explore("1f1b", 2, 4, model=model), MODEL),
}

# Enums, records and errors, functions without arguments, and functions that ranks call.
NOT_CALLED = {
    *["Op", "Span", "Problem", "schedules", "doctor", "give_back", "show_live"],
    *[name for name in pp.__all__ if name.endswith("Error")],
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Undo what a call writes."""
    monkeypatch.chdir(tmp_path)


def test_every_public_name_is_called():
    called = {name.partition(".")[0].partition(",")[0] for name in CALLS}
    assert called >= set(pp.__all__) - NOT_CALLED
    for module in (pp.export, pp.partition, pp.theory):
        own = {
            name
            for name, each in vars(module).items()
            if inspect.isfunction(each) and each.__module__ == module.__name__
        }
        own = {f"{module.__name__.rpartition('.')[2]}.{name}" for name in own if not name.startswith("_")}
        assert own <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_works_or_is_refused(name):
    function, *right = CALLS[name]
    function(*right)
    raw = []
    for position in range(len(right)):
        for wrong in WRONG:
            try:
                function(*right[:position], wrong, *right[position + 1 :])
            except pp.PipelineError as error:
                str(error)
            except Exception as error:
                raw.append(f"argument {position}, {str(type(wrong))[8:-2]} {wrong!r:.40}: {error!r:.150}")
        pyplot.close("all")
    assert not raw, f"{name}\n" + "\n".join(raw)


# --- errors -----------------------------------------------------------------------------------------------------


WRONG_TYPES = [
    (lambda: pp.Action.parse(None), ParseError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).spans("0"), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).spans(1.5), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).why_idle(0, "soon"), SettingError),
    (lambda: pp.lower("1f1b"), SettingError),
    (lambda: pp.lower(pp.schedule("1f1b", 2, 2), receive="soon"), SettingError),
    (lambda: pp.lower(pp.lower(pp.schedule("1f1b", 2, 2))), SettingError),
    (lambda: pp.lower(pp.schedule("1f1b", 2, 2), fsdp=True, resident=0), SettingError),
    (lambda: pp.align(pp.lower(pp.schedule("1f1b", 2, 2))), SettingError),
    (lambda: pp.align(None), SettingError),
    (lambda: pp.merge_backward([]), SettingError),
    (lambda: pp.strip(3), SettingError),
    (lambda: pp.export.to_torch("1f1b"), SettingError),
    (lambda: pp.Placement.custom(None), SettingError),
    (lambda: pp.Placement.custom([0.0, 1.0]), SettingError),
    (lambda: pp.Placement.custom([10**9]), SettingError),
    (lambda: pp.Placement.make("loop", 2).route(Action(0, Op.SEND_B, 0)), SettingError),
    (lambda: pp.Placement.make("loop", 2).route(pp.F(0, 0)), SettingError),
    (lambda: pp.partition.imbalance([1, 2], [3, 4]), SettingError),
    (lambda: pp.view.save(None, "x.json"), SettingError),
    (lambda: pp.view.save([1], "x.json"), SettingError),
    (lambda: Schedule.from_csv(5), SettingError),
    (lambda: pp.schedule("1f1b", 2, 2).to_csv(5), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).save(5), SettingError),
    (lambda: pp.Timeline.load(5), SettingError),
    (lambda: pp.schedule("1f1b", 10**9, 8), SettingError),
    (lambda: pp.schedule("1f1b", 4, 10**12), SettingError),
    (lambda: pp.schedule("interleaved", 4, 8, chunks=10**9), SettingError),
    (lambda: pp.Placement.make("loop", 10**8), SettingError),
    (lambda: pp.theory.peak("1f1b", 10**8, 8), SettingError),
    (lambda: pp.schedule("gpipe", 4, 8, lifo="no"), SettingError),
    (lambda: Costs(backward=1, input=2), SettingError),
    (lambda: pp.schedule(["1f1b"], 2, 2), SettingError),
    (lambda: pp.register("number")(5), SettingError),
    (lambda: Costs(forward=b"12"), SettingError),
    (lambda: Costs(forward="12"), SettingError),
    (lambda: Costs(forward={1: 2}), SettingError),
    (lambda: Costs.fit(pp.schedule("1f1b", 2, 2)), SettingError),
    (lambda: Costs.fit(None), SettingError),
    (lambda: pp.simulate(pp.simulate(pp.schedule("1f1b", 2, 2))), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2), 2), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).text("80"), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).text(0), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).text(79.5), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).memory("0"), SettingError),
    (lambda: pp.simulate(pp.schedule("1f1b", 2, 2)).why_idle(0, [1]), SettingError),
    (lambda: pp.theory.idle("1f1b", "4", 8), SettingError),
    (lambda: pp.theory.idle("1f1b", [4], 8), SettingError),
    (lambda: pp.theory.peak("1f1b", 4, None), SettingError),
    (lambda: pp.theory.idle(pp.schedule("1f1b", 2, 2), 4, 8), SettingError),
    (lambda: pp.theory.least_makespan("1f1b", 8), SettingError),
    (lambda: pp.theory.least_makespan(4, 8, 2), SettingError),
]


def test_a_wrong_type_is_refused():
    for call, error in WRONG_TYPES:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("text", ["0F0,0B0,0F1000000,0B1000000", "0F0,0F111111111", "0F0,999999999B0"])
def test_a_typo_in_a_large_csv_is_reported_quickly(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ParseError, match=r"but has \d actions?"):
        Schedule.from_csv(tmp_path / "x.csv")


def test_blank_lines_at_the_end_of_a_csv_are_not_ranks(tmp_path):
    (tmp_path / "x.csv").write_text("0F0,0B0\n\n\n")
    assert Schedule.from_csv(tmp_path / "x.csv").ranks == 1


@pytest.mark.parametrize("microbatches", [True, "1", -1])
def test_an_expected_number_of_microbatches_must_be_a_number(tmp_path, microbatches):
    (tmp_path / "x.csv").write_text("0F0,0B0")
    with pytest.raises(SettingError):
        Schedule.from_csv(tmp_path / "x.csv", microbatches=microbatches)


def test_fit_keeps_the_memory_of_an_activation():
    run = pp.simulate(pp.schedule("1f1b", 2, 3), Costs(activation=7))
    assert pp.simulate(run.schedule, Costs.fit(run)).peak_activations == run.peak_activations
