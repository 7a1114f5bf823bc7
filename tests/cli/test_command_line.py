"""`ppedu list | draw | check | simulate | export`, as typed at a terminal. `train` is tested with `run`."""

import os
import subprocess
import sys
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu.cli.main import main

LEGAL = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
ILLEGAL = "0F0,0B0,0F1,1B1\n1B0,1F0,1F1,0B1\n"
V = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"legal.csv": LEGAL, "illegal.csv": ILLEGAL, "v.CSV": V, "odd.csv": "0F0x\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def cli(capsys):
    """Return a function that runs a command and returns its exit code, its stdout and its stderr."""

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def process(*arguments, **options):
    words = [sys.executable, "-m", "ppedu", *arguments]
    return subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=60, **options)


# --- the commands -----------------------------------------------------------------------------------------------


def test_list_prints_the_table_of_schedules(cli):
    assert cli("list") == (0, f"{pp.schedules()}\n", "")


def test_draw_prints_the_timeline_as_wide_as_the_terminal(cli, monkeypatch):
    for width in (60, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        code, drawn, _ = cli("draw", "zb-h1", "-r", "3", "-m", "6")
        assert code == 0 and drawn == pp.simulate(pp.schedule("zb-h1", 3, 6)).text(width) + "\n"
        assert max(map(len, drawn.splitlines()[1:])) <= width


@pytest.mark.parametrize("ending", [".json", ".svg"])
def test_draw_saves_the_format_of_the_file_ending(cli, folder, ending):
    assert cli("draw", "1f1b", "-r", "2", "-m", "2", "--save", f"x{ending}") == (0, "", "")
    pp.simulate(pp.schedule("1f1b", 2, 2)).save(folder / f"y{ending}")
    assert (folder / f"x{ending}").read_bytes() == (folder / f"y{ending}").read_bytes()


def test_simulate_prints_the_totals_and_a_line_for_each_rank(cli):
    code, output, _ = cli("simulate", "1f1b")
    title, *lines = output.splitlines()
    lines = [line.split() for line in lines]
    assert code == 0 and title == "1f1b, 4 ranks, 8 microbatches"
    assert lines[:4] == [["makespan", "33"], ["bubble", "27.3%"], ["overhead", "37.5%"], ["span", "33"]]
    assert lines[-4:] == [["0", "9", "4"], ["1", "9", "3"], ["2", "9", "2"], ["3", "9", "1"]]


@pytest.mark.parametrize(
    ("arguments", "makespan"),
    [
        ("1f1b -r 4 -m 16", 57),
        ("zb-h1 -r 4 -m 16", 51),
        ("interleaved --microbatches 16 -o chunks=4", 50.25),
        ("interleaved -m 16 -o chunks=4 -o group=4", 50.25),
        ("1f1b --backward 1", 22),
        ("1f1b --forward 0.1 --backward=1/5", 3.3),
        ("1f1b -r 2 -m 1 --latency 1/3", Fraction(6) + Fraction(2, 3)),
        ("zb-h1 -r 4 -m 8 --input 1 --weight 1", 27),
        ("1f1b-overlap -r 8 -m 32 --overlap 5/2", 101.5),
        ("legal.csv", 9),
        ("v.CSV --placement v", 6),
    ],
)
def test_times_and_options_reach_the_schedule(cli, arguments, makespan):
    code, output, error = cli("simulate", *arguments.split())
    assert (code, error) == (0, "")
    assert output.splitlines()[1].split() == ["makespan", f"{float(makespan):.4g}"]


def test_check_prints_legal_for_a_legal_schedule(cli):
    assert cli("check", "legal.csv") == (0, "legal\n", "")
    assert cli("check", "legal.csv", "-m", "2") == (0, "legal\n", "")
    assert cli("check", "v.CSV", "--placement", "v") == (0, "legal\n", "")
    assert cli("check", "dualpipe", "-r", "4", "-m", "8") == (0, "legal\n", "")


def test_check_prints_a_line_for_each_problem_and_exits_with_1(cli, folder):
    problems = pp.check(pp.Schedule.from_csv(folder / "illegal.csv"))
    assert len(problems) >= 3
    assert cli("check", "illegal.csv") == (1, "".join(f"{problem}\n" for problem in problems), "")


def test_check_suggests_the_placement_that_fits(cli):
    code, output, _ = cli("check", "v.CSV")
    assert code == 1 and output.count("\n") == 1 and "with 'v' the same orders are" in output
    assert "--placement v" in output
    code, _, error = cli("draw", "v.CSV")
    assert code == 1 and "--placement v" in error


def test_an_exported_csv_can_be_read_back(cli, folder):
    made = pp.schedule("zb-v", 4, 8)
    assert cli("export", "zb-v") == (0, made.to_csv(), "")
    assert cli("export", "zb-v", "--save", "x.csv") == (0, "", "")
    assert (folder / "x.csv").read_text() == made.to_csv()
    assert cli("export", "x.csv", "--placement", "v") == (0, made.to_csv(), "")
    assert cli("export", "zb-v", "--save", "x.json", "--latency", "2") == (0, "", "")
    loaded = pp.Timeline.load(folder / "x.json")
    assert loaded.schedule == made and loaded.makespan == pp.simulate(made, pp.Costs(latency=2)).makespan


@pytest.mark.parametrize("receive", ["early", "late"])
def test_export_with_lower_adds_messages(cli, receive):
    made = pp.schedule("1f1b", 4, 8)
    assert cli("export", "1f1b", "--lower", receive) == (0, pp.lower(made, receive=receive).to_csv(), "")


def test_export_for_torch_contains_only_actions_of_torch(cli):
    code, output, _ = cli("export", "interleaved-overlap", "-o", "backward_first=True", "--torch")
    assert code == 0 and output and "OVERLAP" not in output


def test_autopsy_reads_names_of_ones_own_in_a_folder(cli, folder):
    lines = ["step,rank,name,start,dur", "0,0,fwd,0,1", "0,1,fwd,1,1", "0,1,bwd,2,2", "0,0,bwd,4,2"]
    (folder / "traces").mkdir()
    (folder / "traces" / "x.csv").write_text("\n".join(lines).replace("fwd", "step_f").replace("bwd", "step_b"))
    code, output, _ = cli("autopsy", "traces", "--name", "step_f=F", "--name", "step_b=B")
    assert code == 0 and "2 ranks, 1 microbatch: 1 step of 6 s, bubble 50.0%" in output


# --- errors -----------------------------------------------------------------------------------------------------

BAD = {
    "draw nope": "unknown schedule 'nope'",
    "draw 1f1b -r 0": "ranks must be at least 1; got 0",
    "simulate 1f1b -m 0": "microbatches must be at least 1; got 0",
    "draw 1f1b --forward -1": "forward must be a number of at least 0; got -1",
    "draw zb-h1 --input 3 --backward 2": "half of a split backward takes longer",
    "draw 1f1b -o chunks=2": "the schedule '1f1b' takes",
    "draw interleaved -o rank=2": "the schedule 'interleaved' takes",
    "draw interleaved -o chunks=0": "chunks must be at least 1",
    "draw interleaved -o chunks=1/2": "chunks must be a whole number",
    "draw 1f1b --placement v": "the placement of '1f1b' is fixed",
    "draw 1f1b --save x.txt": "cannot save a timeline as 'x.txt'; end it in .json, .html, .svg",
    "draw 1f1b --save nowhere/x.svg": "cannot write 'nowhere/x.svg'",
    "export 1f1b --save x.svg": "cannot export to 'x.svg'; end it in .csv or .json",
    "export 1f1b --save nowhere/x.csv": "cannot write 'nowhere/x.csv'",
    "export 1f1b --latency 2": "a CSV table has no times; leave out --latency, or end --save in .json",
    "export 1f1b --forward 2 --save x.csv": "leave out --forward",
    "export 1f1b --torch --save x.json": "--torch is about a CSV table",
    "lessons --no-open --lab=--port=1": "--lab is for JupyterLab, which --no-open does not start",
    "assignment 05 99": "there is no lesson '99'; the lessons are 01, 02,",
    "assignment tiny --out legal.csv": "cannot write to legal.csv: File exists; choose another folder with --out",
    "grade x.ipynb --limit 0": "--limit must be a number of seconds above 0; got 0.0",
    "grade x.ipynb --out legal.csv": "cannot write to legal.csv: File exists; choose another folder with --out",
    "leaderboard .": "no report in . has a right answer to exercise 14.1; grade lesson 14 first",
    "plan x.toml --html x.svg": "--html writes a page; end its name in .html; got 'x.svg'",
    "plan x.toml --html nowhere/x.html": "cannot write 'nowhere/x.html'",
    "plan x.toml --save x.html --torch y --html ./x.html": "--save, --torch and --html write different things",
    "autopsy run.json --html x.svg": "--html writes a page; end its name in .html; got 'x.svg'",
    "autopsy x.csv --name (=F": "names: '(': 'F' is not usable",
    "autopsy run.json --predict zb-h9": "unknown schedule 'zb-h9'",
    "check nowhere.csv": "cannot read 'nowhere.csv'",
    "check odd.csv": "'odd.csv', line 1, cell 1: '0F0x' is not an action",
    "check legal.csv -m 3": "'legal.csv' has microbatches 0 to 1, which is 2, not 3",
    "check legal.csv -r 2": "the ranks and options of 'legal.csv' are those of the file; leave out -r and -o",
    "check legal.csv -o chunks=2": "leave out -r and -o",
    "check legal.csv --placement ring": "unknown placement 'ring'",
}


@pytest.mark.parametrize("arguments", BAD)
def test_an_invalid_setting_prints_one_line_and_exits_with_1(cli, arguments):
    code, output, error = cli(*arguments.split())
    assert (code, output, error.count("\n")) == (1, "", 1)
    assert error.startswith("ppedu: ") and BAD[arguments] in error


@pytest.mark.parametrize("command", ["draw", "simulate", "export"])
def test_an_illegal_schedule_is_neither_drawn_nor_exported(cli, command):
    code, output, error = cli(command, "illegal.csv")
    assert (code, output) == (1, "") and "is not legal:\n  rank 0, position" in error


USAGE = {
    "": "required: COMMAND",
    "drawn 1f1b": "invalid choice: 'drawn'",
    "draw": "required: SCHEDULE",
    "draw 1f1b -r four": "invalid int value: 'four'",
    "draw 1f1b --forwards 1": "unrecognized arguments: --forwards 1",
    "draw 1f1b --forward 1/0": "'1/0' is not a number such as 2, 0.5 or 1/3",
    "draw 1f1b --latency 1e999999999": "is not a number",
    "draw 1f1b --latency nan": "is not a number",
    "autopsy x.csv --name forward_step": "'forward_step' is not a name and an action, such as forward_step=F",
    "draw interleaved -o chunks": "'chunks' is not an option such as chunks=3",
    "draw gpipe -o lifo=yes": "'lifo=yes' is not an option such as chunks=3 or lifo=True",
    "draw gpipe -o ranks=2": "'ranks=2' is not an option",
    "export 1f1b --lower soon": "invalid choice: 'soon'",
}


@pytest.mark.parametrize("arguments", USAGE)
def test_an_invalid_command_line_prints_the_usage_and_exits_with_2(cli, arguments):
    code, output, error = cli(*arguments.split())
    assert (code, output) == (2, "")
    assert error.startswith("usage: ppedu") and USAGE[arguments] in error


def test_the_help_lists_commands_and_settings(cli):
    code, output, _ = cli("--help")
    assert code == 0
    for command in ("list", "draw", "check", "simulate", "export", "train"):
        assert f"\n    {command} " in output
    _, output, _ = cli("draw", "--help")
    for setting in ("--ranks", "--option", "--placement", "--save", "--overlap TIME", "--latency TIME"):
        assert f" {setting}" in output


# --- the process ------------------------------------------------------------------------------------------------


def test_the_process_exits_with_the_code_and_no_traceback():
    assert process("check", "legal.csv").stdout == "legal\n"
    refused = process("draw", "nope")
    assert (refused.returncode, refused.stdout) == (1, "") and refused.stderr.startswith("ppedu: unknown schedule")


def test_drawing_works_in_a_terminal_with_a_small_character_set():
    drawn = process("draw", "1f1b", "-r", "2", "-m", "2", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "rank 1 ?   F0 B0" in drawn.stdout


@pytest.mark.parametrize("arguments", ["check 1f1b", "--help", "export 1f1b -r 64 -m 400"])
def test_a_closed_pipe_ends_the_command_without_an_error(arguments):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "ppedu", *arguments.split()]
    ended = subprocess.run(words, env=buffered, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


PROGRAM = """
import sys
from ppedu.cli.main import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
assert not {"torch", "numpy", "matplotlib", "IPython"} & set(sys.modules)
"""


def test_all_commands_but_pictures_need_only_the_standard_library():
    commands = [
        *["list", "draw 1f1b", "check 1f1b", "simulate 1f1b"],
        "export 1f1b --lower early",
        "export 1f1b --save x.json",
    ]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *commands], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
