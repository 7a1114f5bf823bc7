"""What is of the wrong type, or far too large, is refused in a sentence; nothing takes for ever."""

import pytest

import ppedu as pp
from ppedu import Action, Costs, Op, ParseError, Schedule, SettingError


@pytest.mark.parametrize(
    ("call", "error"),
    [
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
        (lambda: pp.check(pp.schedule("1f1b", 2, 2), ranks=[2]), SettingError),
        (lambda: pp.check(pp.schedule("1f1b", 2, 2), ranks=1), SettingError),
        (lambda: pp.strip(pp.schedule("1f1b", 2, 2)), SettingError),
        (lambda: pp.export.to_torch("1f1b"), SettingError),
        (lambda: pp.export.signed_order(None), SettingError),
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
        (lambda: pp.theory.least_span(4, 8, most="k"), SettingError),
        (lambda: pp.theory.microbatches_for(0.2, "4"), SettingError),
    ],
)
def test_a_wrong_type_is_refused(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("text", ["0F0,0B0,0F1000000,0B1000000", "0F0,0F111111111", "0F0,999999999B0"])
def test_a_typo_in_a_csv_is_named_at_once(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ParseError, match=r"but has . actions?"):
        Schedule.from_csv(tmp_path / "x.csv")


def test_blank_lines_at_the_end_of_a_csv_are_no_ranks(tmp_path):
    (tmp_path / "x.csv").write_text("0F0,0B0\n\n\n")
    assert Schedule.from_csv(tmp_path / "x.csv").ranks == 1


@pytest.mark.parametrize("microbatches", [True, "1", -1])
def test_the_number_of_microbatches_meant_is_a_number(tmp_path, microbatches):
    (tmp_path / "x.csv").write_text("0F0,0B0")
    with pytest.raises(SettingError):
        Schedule.from_csv(tmp_path / "x.csv", microbatches=microbatches)


def test_fit_keeps_what_an_activation_weighs():
    run = pp.simulate(pp.schedule("1f1b", 2, 3), Costs(activation=7))
    assert pp.simulate(run.schedule, Costs.fit(run)).peak_activations == run.peak_activations
