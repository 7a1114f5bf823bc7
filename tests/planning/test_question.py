"""Questions in TOML files, and the command `plan`."""

import contextlib
import inspect
import io
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu.cli.main import main
from ppedu.planning.question import EXAMPLE, read

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought tomllib")


def test_the_example_is_planned(tmp_path, capsys):
    (tmp_path / "model.toml").write_text(
        EXAMPLE.replace("microbatches = 32", "microbatches = 8") + '\nschedules = ["1f1b", "zb-v"]\n'
    )
    csv, page = tmp_path / "best.csv", tmp_path / "best.html"
    assert main(["plan", str(tmp_path / "model.toml"), "--torch", str(csv), "--html", str(page)]) == 0
    question = read(tmp_path / "model.toml")
    assert [piece.forward for piece in question["model"].pieces] == [0.5, *[12] * 32, 29]
    best = pp.plan(**question).best
    assert f"best: {best.name}" in capsys.readouterr().out
    assert csv.read_text() == pp.export.to_torch(best.schedule)
    assert "zb-v" in page.read_text()


def test_published_names(tmp_path):
    (tmp_path / "x.toml").write_text('model = "llama-3-8b"\nmachine = "h100"\n[plan]\nranks = 4\nsequence = 2048\n')
    assert read(tmp_path / "x.toml") == {"model": "llama-3-8b", "machine": "h100", "ranks": 4, "sequence": 2048}
    (tmp_path / "x.toml").write_text(
        "[model]\nlayers = 2\nwidth = 64\nheads = 4\nvocabulary = 97\n[machine]\nmemory = 1e9\n[plan]\nranks = 2\n"
    )
    assert read(tmp_path / "x.toml")["model"] == pp.Model(2, 64, 4, 97)


TABLES = "[model]\n{}\n[machine]\n{}\n[plan]\n{}\n"
WRONG = {
    "no such file": (None, "x.toml': No such file or directory"),
    "not TOML": ("model =", "is not TOML"),
    "a table is missing": ("[model]\nlayers = 2\n", "must have the tables model, machine and plan"),
    "an unknown size": (
        TABLES.format("layer = 3", "memory = 1", "ranks = 2"),
        "unknown key 'layer' in [model] with sizes; did you mean 'layers'? the keys are layers, width, heads",
    ),
    "an unknown machine": (
        TABLES.format("forward = [1, 2]", "ram = 1", "ranks = 2"),
        "unknown key 'ram' in [machine]; the keys are memory, flops, peak, latency",
    ),
    "a wrong number": (TABLES.format("forward = [1, -2]", "memory = 1", "ranks = 2"), "numbers of at least 0"),
    "layers in quotes": (
        TABLES.format('layers = "32"\nforward = [1, 2, 3]', "memory = 1", "ranks = 2"),
        "layers must be",
    ),
    "a machine as a number": (
        "model = 'gpt2'\nmachine = 5\n[plan]\nranks = 2\n",
        "machine must be a table, or a name in",
    ),
    "a piece too few": (
        TABLES.format("forward = [1]", "memory = 1e9", "ranks = 2\nmicrobatches = 4"),
        "2 ranks are more than the 1 piece of the model",
    ),
    "no ranks": (TABLES.format("forward = [1, 2]", "memory = 1e9", "microbatches = 4"), "[plan] lacks 'ranks'"),
    "an unknown option": (
        TABLES.format("forward = [1, 2]", "memory = 1e9", "ranks = 2\ncolor = 1"),
        "unknown key 'color' in",
    ),
    "it does not fit": (
        TABLES.format("forward = [1, 2]\nweights = 1000000", "memory = 1e6", "ranks = 2\nmicrobatches = 4"),
        "nothing fits",
    ),
}


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_questions(tmp_path, capsys, text, reason):
    if text is not None:
        (tmp_path / "x.toml").write_text(text)
    assert main(["plan", str(tmp_path / "x.toml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ppedu: ") and reason in error


CONTRADICTORY = {
    "layers and rows": (
        TABLES.format("layers = 4\nforward = [1, 2]", "memory = 1e9", "ranks = 2"),
        "layers = 4 contradicts the 2 entries of forward; give forward three entries (the embedding, each layer, the",
    ),
    "layers and another row": (
        TABLES.format("layers = 4\nforward = [1, 2, 3]\nweights = [1, 2, 3, 4]", "memory = 1e9", "ranks = 2"),
        "layers = 4 contradicts the 4 entries of weights",
    ),
    "too many layers": (
        TABLES.format("layers = 100000000\nforward = [1, 2, 3]", "memory = 1e9", "ranks = 2"),
        "layers must be at most 10000; got 100000000",
    ),
    "a function": (
        TABLES.format("forward = [1, 2]", "memory = 1e9", "ranks = 2\nprogress = 1"),
        "unknown key 'progress' in [plan]; the keys are ranks, microbatches, sequence",
    ),
    "times and sizes": (
        TABLES.format("forward = [1, 2]\nwidth = 64", "memory = 1e9", "ranks = 2"),
        "unknown key 'width' in [model] with forward; it belongs in [model] with sizes; the keys are forward, backward",
    ),
    "another table": (
        TABLES.format("forward = [1, 2]", "memory = 1e9\nmicrobatches = 8", "ranks = 2"),
        "unknown key 'microbatches' in [machine]; it belongs in [plan]",
    ),
    "two tables": (
        TABLES.format("forward = [1, 2]\nbytes_per_weight = 16", "memory = 1e9", "ranks = 2\nbytes_per_weight = 18"),
        "bytes_per_weight is in [model] and in [plan]; leave out one of them",
    ),
    "an unknown table": (
        TABLES.format("forward = [1, 2]", "memory = 1e9", "ranks = 2") + "[machines]\nmemory = 2e9",
        "unknown key 'machines' in the file; did you mean 'machine'?",
    ),
    "a number of 5000 digits": (TABLES.format(f"layers = {'9' * 5000}", "memory = 1e9", "ranks = 2"), "is not TOML"),
    "hexadecimal": (TABLES.format(f"layers = 0x{'f' * 5000}", "memory = 1e9", "ranks = 2"), "is not TOML"),
    "lists in lists": (TABLES.format(f"forward = {'[' * 5000}", "memory = 1e9", "ranks = 2"), "is not TOML"),
}


@pytest.mark.parametrize(("text", "reason"), CONTRADICTORY.values(), ids=CONTRADICTORY)
def test_what_would_be_ignored_is_refused_by_name(tmp_path, text, reason):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(pp.ParseError) as caught:
        read(tmp_path / "x.toml")
    assert reason in str(caught.value)


# Questions with every key, each with two values. Both make sense beside the others.
SIZES = {
    "layers": ("4", "5"),
    "width": ("64", "128"),
    "heads": ("4", "8"),
    "vocabulary": ("97", "99"),
    "kv_heads": ("4", "2"),
    "ffn": ("256", "128"),
    "head_size": ("16", "32"),
    "gated": ("true", "false"),
    "norm": ('"rms"', '"layer"'),
    "biases": ('"none"', '"all"'),
    "qk_norm": ("true", "false"),
    "positions": ("0", "16"),
    "tied": ("true", "false"),
    "experts": ("4", "6"),
    "active": ("1", "2"),
    "shared": ("0", "1"),
    "dropout": ("true", "false"),
    "flash": ("true", "false"),
    "imbalance": ("1", "1.5"),
    "dense": ("1", "2"),
    "dense_ffn": ("256", "128"),
    "predictions": ("0", "1"),
}
GROUPED = {"kv_heads", "biases", "qk_norm"}
LATENT = {"key_rank": ("8", "16"), "query_rank": ("8", "16"), "rotary": ("2", "4")}
TIMES = {
    "layers": ("4", "5"),
    "forward": ("[1, 2, 3]", "[1, 2, 4]"),
    "backward": ("[2, 4, 6]", "[2, 5, 6]"),
    "input": ("[1, 2, 3]", "[1, 3, 3]"),
    "weight": ("[1, 2, 3]", "[1, 1, 3]"),
    "activation": ("[0, 10, 20]", "5"),
    "weights": ("[10, 20, 10]", "7"),
    "bytes_per_weight": ("16", "[2, 4, 12]"),
    "unit": ('"ms"', '"us"'),
    "message": ("0", "1000"),
    "weight_memory": ("1", "0.5"),
    "logits": ("0", "5"),
    "tensor": ("2", "4"),
}
MACHINE = {
    "memory": ("1e9", "2e9"),
    "flops": ("1e12", "2e12"),
    "peak": ("4e12", "5e12"),
    "latency": ("0", "0.5"),
    "bandwidth": ("1e9", "2e9"),
    "node": ("4", "2"),
    "near_latency": ("0", "0.1"),
    "near_bandwidth": ("3e9", "4e9"),
    "memory_bandwidth": ("1e12", "2e12"),
    "attention": ("1e12", "2e12"),
    "unit": ('"s"', '"ms"'),
    "fp8": ("2", "3"),
    "nvfp4": ("4", "6"),
    "spread": ("0.1", "0.2"),
}
PLAN = {
    "ranks": ("2", "1"),
    "microbatches": ("[4, 5]", "6"),
    "sequence": ("64", "128"),
    "batch": ("1", "2"),
    "replicas": ("2", "4"),
    "schedules": ('"1f1b"', '["gpipe", "1f1b"]'),
    "recompute": ("false", "true"),
    "zero": ("0", "1"),
    "blocking": ("false", "true"),
    "barrier": ("true", "false"),
    "host_bandwidth": ("1e9", "2e9"),
    "effort": ("0", "1"),
    "seconds": ("0", "1"),
}
SPLIT = {  # only for a model with sizes, [plan] says how GPUs split it and what a library keeps of it
    "tensor": ("2", "1"),
    "context": ("1", "2"),
    "expert": ("2", "1"),
    "sequence_parallel": ("true", "false"),
    "overlap": ("false", "true"),
    "shard_vocabulary": ("false", "true"),
    "graphs": ("false", "true"),
    "dispatcher": ('"deepep"', '"alltoall"'),
    "tensor_overlap": ("false", "true"),
    "element": ("2", "4"),
    "bytes_per_weight": ("16", "18"),
    "implementation": ('"megatron"', '"pytorch"'),
    "precision": ('"bf16"', '"fp8"'),
}
KINDS = {
    "sizes": {"model": SIZES, "machine": MACHINE, "plan": PLAN | SPLIT},
    "latent": {
        "model": {key: values for key, values in (SIZES | LATENT).items() if key not in GROUPED},
        "machine": MACHINE,
        "plan": PLAN | SPLIT,
    },
    "times": {"model": TIMES, "machine": MACHINE, "plan": PLAN},
}


def written(tables, which=lambda table, key: 0):
    """Return the text of a file with one of the two values of each key."""
    lines = []
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {values[which(table, key)]}" for key, values in keys.items())]
    return "\n".join(lines)


def planned(path, text):
    """Return what a file asks for: the model and the machines, and which schedules are compared."""
    path.write_text(text)
    plan = pp.plan(**read(path))
    compared = sorted((each.name, each.schedule.microbatches, each.recompute) for each in plan.choices)
    return plan.job, compared


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_changes_the_question(tmp_path, kind):
    tables, path = KINDS[kind], tmp_path / "x.toml"
    assert {name: {*keys} for name, keys in tables.items()} == {
        "model": {
            "sizes": {*inspect.signature(pp.Model).parameters} - {*LATENT},
            "latent": {*inspect.signature(pp.Model).parameters} - GROUPED,
            "times": {*inspect.signature(pp.Model.measured).parameters, "layers"},
        }[kind],
        "machine": {*inspect.signature(pp.Machine).parameters},
        "plan": {*inspect.signature(pp.plan).parameters}
        - {"model", "machine", "progress", "split", "partition"}  # a partition must fit the layers; see test_plan.py
        | (set() if kind == "times" else {*inspect.signature(pp.Model.pieces).parameters} - {"self", "model", "past"}),
    }
    before = planned(path, written(tables))
    for table, keys in tables.items():
        for key in {*keys} - {"effort", "seconds"}:  # which change how long a search is
            assert planned(path, written(tables, lambda *one, other=(table, key): int(one == other))) != before, key


WEIRD = [
    *['""', '"4"', '"1f1b"', '"h100"', "true", "false", "nan", "inf", "-inf", "-1", "0", "1", "2.0", "2.5", "1e300"],
    *["[]", "[1]", "[1, 2, 3]", "[nan, 1, 2]", "[[1]]", '["1f1b"]', '[""]', "{}", "{a = 1}", "1979-05-27", "07:32:00"],
    *["9" * 20, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "10000000", "1000000000", "'\\u0000'", '"\\u0000"'],
]


@st.composite
def files(draw):
    """Draw a file that was right before a few of its keys were dropped, moved, doubled, misspelt or given a value."""
    tables = {name: dict(keys) for name, keys in KINDS[draw(st.sampled_from([*KINDS]))].items()}
    chance = draw(st.randoms(use_true_random=False))
    tables = {name: {key: chance.choice(values) for key, values in keys.items()} for name, keys in tables.items()}
    for keys in tables.values():  # most keys have defaults
        for key in [*keys]:
            if key not in ("layers", "width", "heads", "vocabulary", "forward", "memory", "ranks", "flops", "sequence"):
                chance.random() < 0.6 and keys.pop(key)
    for _ in range(draw(st.integers(0, 3))):
        keys, other = chance.choice([*tables.values()]), chance.choice([*tables.values()])
        key = chance.choice([*keys, "color"])
        match draw(st.sampled_from(["drop", "double", "move", "misspell", *["value"] * 6])):
            case "drop":
                keys.pop(key, None)
            case "double":
                other[key] = keys.get(key, "1")
            case "move":
                other[key] = keys.pop(key, "1")
            case "misspell":
                keys[f"{key}s"] = keys.pop(key, "1")
            case "value":
                keys[key] = draw(st.sampled_from(WEIRD))
    tables["plan"].setdefault("seconds", "0")
    return "\n".join(line for table, keys in tables.items() for line in (f"[{table}]", *map(" = ".join, keys.items())))


@often(600)
@given(text=files())
def test_any_file_is_planned_or_refused_soon(text, tmp_path_factory):
    path, begin = tmp_path_factory.getbasetemp() / "any.toml", time.monotonic()
    path.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(["plan", str(path)])
    error = told.getvalue()
    assert (code, error) == (0, "") or (code == 1 and error.startswith("ppedu: ") and len(error) < 12_000)
    assert time.monotonic() - begin < 20
