"""Schedules as continuous integration sees them: `verify`, `check_schedule` and `ppedu verify`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ppedu as pp
from ppedu.cli.main import main
from ppedu.testing import check_schedule

# Rank 0 sends its second activation while rank 1 sends its first gradient: both wait, unless sends are buffered.
CROSSED = """0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


@pytest.fixture
def crossed(tmp_path):
    (tmp_path / "crossed.csv").write_text(CROSSED)
    return pp.Schedule.from_csv(tmp_path / "crossed.csv")


@pytest.mark.parametrize("transport", ["buffered", "rendezvous", "pair", "rank"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe"])
def test_published_schedules_may_run(name, transport):
    check_schedule(pp.schedule(name, 4, 8), transport=transport)


def test_sends_that_wait_block_each_other(crossed):
    assert pp.verify(crossed) == []
    [finding] = pp.verify(crossed, transport="rendezvous")
    assert finding.rank == 0 and "deadlock" in finding.text
    with pytest.raises(
        AssertionError, match=r"crossed:\ndeadlock: rank 0 waits at position 3 \(0SEND_F1\) for 1RECV_F1"
    ):
        check_schedule(crossed, transport="rendezvous")


def test_a_rank_may_hold_as_much_as_is_allowed():
    """Rank r of p holds p - r activations in 1F1B (arXiv 2104.04473, section 2.2.1), and all in GPipe."""
    one_f_one_b = pp.schedule("1f1b", 4, 8)
    assert pp.verify(one_f_one_b, peak=4) == pp.verify(one_f_one_b, peak=[4, 3, 2, 1]) == []
    assert [each.rank for each in pp.verify(one_f_one_b, peak=2.5)] == [0, 1]
    assert [each.text for each in pp.verify(one_f_one_b, peak=[4, 3, 2, 0])] == [
        "rank 3 holds 1 activations at its peak; the limit is 0"
    ]
    gpipe = pp.verify(pp.schedule("gpipe", 4, 8), baseline=one_f_one_b)
    assert [each.text for each in gpipe][:1] == ["the peak of rank 0 rose from 4 to 8 activations"] and len(gpipe) == 4


def test_a_step_may_not_take_longer_than_before():
    """1F1B takes m + p - 1 times F and B. ZB-H1 fills two thirds of its bubble of (p - 1) (arXiv 2401.10241)."""
    zb_h1, one_f_one_b = pp.schedule("zb-h1", 4, 8), pp.schedule("1f1b", 4, 8)
    *peaks, longer = pp.verify(one_f_one_b, baseline=zb_h1)
    assert peaks == [] and longer == (None, "a step takes longer: 27 to 33 forwards, if a backward takes two", "")
    assert pp.verify(one_f_one_b, baseline=one_f_one_b) == []


def test_a_stage_has_as_many_buffers_as_are_allowed(crossed):
    """Rank r of p holds p - r microbatches in 1F1B (arXiv 2104.04473, section 2.2.1)."""
    one_f_one_b = pp.schedule("1f1b", 4, 8)
    for transport in ("buffered", "rendezvous", "rank"):
        assert pp.verify(one_f_one_b, transport=transport, buffers=4) == []
        found = pp.verify(one_f_one_b, transport=transport, buffers=2)
        assert {(each.rank, each.kind) for each in found} == {(0, "buffer"), (1, "buffer")}
        assert found[0].text.startswith(
            "rank 0, position 2: 0F2 fills the buffer of microbatch 0, which is in use until"
        )
    assert [each.kind for each in pp.verify(crossed, transport="rendezvous", buffers=1)] == ["deadlock"]
    with pytest.raises(AssertionError, match="4 buffers would do"):
        check_schedule(one_f_one_b, buffers=3)


def test_sharded_orders_without_messages_get_them():
    order = "0F0 0B0 0REDUCE_GRAD\n1F0 1B0 1REDUCE_GRAD"
    for transport in ("buffered", "rendezvous", "pair", "rank"):
        assert pp.verify(pp.Schedule.read(order), transport=transport) == []


def test_another_placement_is_suggested(tmp_path):
    pp.schedule("zb-v", 4, 8).to_csv(tmp_path / "v.csv")
    [rejection] = pp.verify(pp.Schedule.from_csv(tmp_path / "v.csv"))
    assert "choose that placement" in rejection.text


def test_what_cannot_be_compared_is_an_error():
    schedule = pp.schedule("1f1b", 4, 8)
    for options, problem in [
        ({"baseline": pp.schedule("1f1b", 4, 6)}, "the schedule has 8 microbatches and the baseline 6"),
        ({"baseline": "1f1b"}, "verify"),
        ({"buffers": 0}, "buffers must be at least 1; got 0"),
        ({"peak": [4, 3]}, "peak has 2 numbers for 4 ranks"),
        ({"peak": "4"}, "peak must be activations of at least 0"),
        (
            {"transport": "nccl"},
            "transport must be one of 'buffered', 'rendezvous', .*; got 'nccl'",
        ),
    ]:
        with pytest.raises(pp.SettingError, match=problem):
            pp.verify(schedule, **options)
    lost = pp.Schedule("lost", schedule.placement, 8, [order[:-1] for order in schedule.orders])
    with pytest.raises(pp.SettingError, match="the baseline is not legal: rank 0: 0B7 is never run"):
        pp.verify(schedule, baseline=lost)
    assert "0B7 is never run" in pp.verify(lost, peak=1)[0].text


def test_the_command(tmp_path, capsys, monkeypatch, crossed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert main(["verify", "crossed.csv", "--peak", "2,1", "--baseline", "crossed.csv"]) == 0
    assert capsys.readouterr().out == "crossed, 2 ranks, 2 microbatches: legal; activations at the peak: 2, 1\n"
    assert main(["verify", "crossed.csv", "--transport", "rendezvous"]) == 1
    assert capsys.readouterr().out.startswith("deadlock: rank 0 waits at position 3 (0SEND_F1)")
    assert main(["verify", "crossed.csv", "--buffers", "2"]) == 0 and "legal" in capsys.readouterr().out
    assert main(["verify", "1f1b", "--buffers", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "the same on 1 rank, 4 microbatches (1f1b: stages 0; microbatches 0, 1, 2, 3, numbered from 0):",
        "rank 0: 0F0 0F1 0F2 [0F3] 0B0 0B1 0B2 0B3",
    ]
    assert main(["verify", "1f1b", "--buffers", "0"]) == 1
    assert capsys.readouterr().err == "ppedu: buffers must be at least 1; got 0\n"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["verify", "crossed.csv", "--peak", "1"]) == 1
    told = "rank 0 holds 2 activations at its peak; the limit is 1\n"
    assert capsys.readouterr().out == f"::error file=crossed.csv,line=1::{told}"
    assert main(["verify", "1f1b", "-r", "2", "-m", "2", "--peak", "1"]) == 1
    assert capsys.readouterr().out == f"::error::{told}"
    pp.schedule("zb-v", 4, 8).to_csv("v.csv")
    assert main(["verify", "v.csv"]) == 1 and "v" in capsys.readouterr().out
    assert main(["verify", "v.csv", "--placement", "v"]) == 0 and "legal" in capsys.readouterr().out
    (tmp_path / "megatron.txt").write_text("1 1 -1 -1\n1 -1 1 -1\n")
    assert main(["verify", "megatron.txt"]) == 0
    assert capsys.readouterr().out.startswith("megatron, 2 ranks, 2 microbatches: legal")
    (tmp_path / "a,b%.txt").write_text("0F0 0B0\n1B0 1F0")
    assert main(["verify", "a,b%.txt"]) == 1
    assert capsys.readouterr().out.startswith("::error file=a%2Cb%25.txt::rank 1, position 0: 1B0 needs 1F0")
    monkeypatch.delenv("GITHUB_ACTIONS")
    pp.schedule("zb-v", 4, 8).to_csv("other.csv")
    assert main(["verify", "interleaved", "--option", "chunks=2", "--baseline", "other.csv"]) == 1
    assert "a step takes longer" in capsys.readouterr().out
    (tmp_path / "missing.txt").write_text("\n".join(f"{rank}F0 {rank}F99" for rank in range(4)))
    assert main(["verify", "missing.txt"]) == 1 and "\n… and " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["verify", "crossed.csv", "--peak", "1,x"])
    assert "give a number, or one for each rank, such as 4,3,2,1" in capsys.readouterr().err


def test_the_action_of_github_fails_with_the_reason(tmp_path):
    """Its last step, run as a workflow runs it; the ones before install."""
    action = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
    (tmp_path / "crossed 2.csv").write_text(CROSSED)
    step = action["runs"]["steps"][-1]
    settings = {name: str(each.get("default", "")) for name, each in action["inputs"].items()}

    def run(**inputs):
        given = {f"${{{{ inputs.{name} }}}}": value for name, value in {**settings, **inputs}.items()}
        environment = {name: given[value] for name, value in step["env"].items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settled = {**os.environ, **environment, "PATH": path, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "s.md"}
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=settled, capture_output=True, text=True
        )

    assert run(schedule="crossed 2.csv").returncode == 0
    failed = run(schedule="crossed 2.csv", transport="rendezvous")
    assert failed.returncode == 1 and failed.stdout.startswith("::error file=crossed 2.csv,line=1::deadlock")
    assert run(schedule="crossed 2.csv", arguments="--peak 1,1").returncode == 1
    _, legal, _, stuck, _, large, _ = (tmp_path / "s.md").read_text().split("```\n")
    drawn = pp.simulate(pp.Schedule.read(CROSSED, name="crossed 2")).text()
    assert legal.startswith("crossed 2, 2 ranks") and legal.endswith(f"\n\n{drawn}\n")
    assert stuck.startswith("deadlock: ") and stuck.endswith(f"\n\n{drawn}\n")
    assert large.startswith("rank 0 holds 2 activations") and large.endswith(f"\n\n{drawn}\n")
