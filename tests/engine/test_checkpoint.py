"""Checkpoints: training that was killed resumes with the same losses, on any ranks, with any schedule."""

import functools
import json
import random
import re
import socket

import pytest
import torch
from cases import BEGIN, OF
from torch.distributed import checkpoint

import ppedu as pp
from ppedu.course.training.data import Text
from ppedu.engine.ranks.versions import checkpoint_function
from ppedu.engine.stages.checkpoint import Checkpoints
from ppedu.run import GPT, TrainConfig, next_token_loss, train_gpt

SMALL = {
    "steps": 6,
    "batch": 8,
    "microbatches": 4,
    "context": 8,
    "layers": 4,
    "heads": 2,
    "width": 16,
    "lr": 1e-2,
    "text": pp.core.checking.__file__,  # one that is at hand, and short
    "every": 2,
}

# Trains. A rank may kill itself when it is about to compute, or to touch a checkpoint's files, for the so-many-th time.
PROGRAM = """
import json, os, signal, sys
import torch.distributed as dist
from ppedu import PipelineError
from ppedu.run import Stage
from ppedu.course.training.train import TrainConfig, train_gpt

settings, killed, what, turn = json.loads(sys.argv[1])
turns = {"forward": 0, "files": 0}

def take_turn(kind):
    turns[kind] += 1
    if (int(os.environ["RANK"]), kind, turns[kind]) == (killed, what, turn):
        os.kill(os.getpid(), signal.SIGKILL)

def watch(event, arguments):
    names = (settings["save"], ".distcp", ".metadata", "about.json")
    if event.startswith(("open", "os.", "shutil.")) and any(name in str(arguments[:1]) for name in names):
        take_turn("files")

def forward(*arguments, forward=Stage.forward):
    take_turn("forward")
    return forward(*arguments)

sys.addaudithook(watch)
Stage.forward = forward
dist.init_process_group("gloo")
try:
    print(json.dumps([train_gpt(TrainConfig(**settings)).losses, turns]))
except PipelineError as error:
    print(json.dumps([str(error), turns]))
dist.barrier()
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def texts(folder, monkeypatch):
    """Three texts in the working directory; the second has the characters of the first, the third has others."""
    folder.parent.joinpath("text.txt").write_text("abcdefgh x" * 20)
    folder.parent.joinpath("again.txt").write_text("x hgfedcba" * 20)
    folder.parent.joinpath("other.txt").write_text("abcdefgh é" * 20)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setitem(SMALL, "text", "text.txt")


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def train(ranks, folder):
    """`train(size, **settings)` returns each rank's losses or error. killed: a rank, before which call, which time."""

    def run(size, killed=(-1, "", 0), **settings):
        job = json.dumps([SMALL | {"save": str(folder)} | settings, *killed])
        output = [json.loads(text.splitlines()[-1]) for text in ranks(PROGRAM, size, job)]
        run.turns = [turns for _, turns in output]
        return [losses for losses, _ in output]

    return run


@pytest.fixture(scope="module")
def plain():
    """The same training and its final state, written with torch alone."""

    @functools.cache
    def run(tied=False):
        torch.set_num_threads(1)
        config = TrainConfig(**SMALL, tied=tied)
        text, losses = Text(config.text), []
        model = GPT(config.gpt(len(text.characters)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        for step in range(config.steps):
            inputs, targets = text.batch(config.batch, config.context, seed=step)
            total = torch.zeros(())
            for x, y in zip(inputs.split(2), targets.split(2), strict=True):
                loss = next_token_loss(model(x), y) / 4
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        return losses, model, optimizer

    return run


chosen = random.Random(4)
# The first rank touches files 12 times up to the first checkpoint and 16 times for each further one, the other twice.
ANYWHERE = [(0, "files", turn) for turn in range(1, 29)] + [(1, "files", turn) for turn in range(1, 5)]
SOME = [(chosen.randrange(2), "forward", chosen.randrange(9, 25)), (0, "files", 19)]


@pytest.mark.parametrize(
    "killed", [*SOME, *(pytest.param(each, marks=pytest.mark.slow) for each in ANYWHERE if each not in SOME)], ids=str
)
def test_training_resumes_after_a_kill_with_the_same_losses(train, plain, folder, killed):
    with pytest.raises(pp.core.errors.RankError, match=f"rank {killed[0]} was killed by SIGKILL"):
        train(2, killed)
    assert train(2, every=3) == [plain()[0]] * 2
    assert contents(folder) == ["lock", "step-6"]


@pytest.mark.filterwarnings("ignore:.* in a single process")
def test_a_checkpoint_of_four_ranks_resumes_on_other_ranks_with_another_schedule(train, plain, folder):
    losses, model, optimizer = plain()
    assert train(4, schedule="1f1b", steps=2) == [losses[:2]] * 4
    assert train(2, schedule="zb-v", steps=4) == [losses[:4]] * 2
    assert train(1, schedule="gpipe") == [losses]

    # torch itself reads the whole model and its optimizer from the folder.
    expected = model.state_dict() | {
        f"optimizer.{name}.{part}": value
        for name, weight in model.named_parameters()
        for part, value in optimizer.state[weight].items()
    }
    found = {name: torch.empty_like(value) for name, value in expected.items()}
    path = folder / "step-6"
    assert set(checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata) == set(expected)
    checkpoint_function("load", None)(found, storage_reader=checkpoint.FileSystemReader(path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_tied_weights_and_two_copies_are_saved_once(train, plain):
    expected = plain(tied=True)[0]
    train(2, schedule="dualpipe", tied=True, steps=2)
    train(2, schedule="dualpipev", tied=True, steps=4)
    train(2, replicas=2, tied=True, steps=5)
    assert train(1, tied=True) == [pytest.approx(expected, rel=1e-5)]


def test_a_damaged_checkpoint_is_reported_in_one_line_on_every_rank(train, folder):
    train(2, steps=2)
    for file in ("__1_0.distcp", "about.json"):
        (folder / "step-2" / file).write_bytes(b"")
        for told in train(2):
            assert told.startswith(f"cannot read the checkpoint '{folder / 'step-2'}'") and told.count("\n") == 0


def test_a_checkpoint_without_a_loss_for_each_step_is_damaged(folder):
    alone(folder)
    file = folder / "step-2" / "about.json"
    for value in "abc", [0.5], [0.5, "a"], {"a": 1, "b": 2}, None, 2:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"losses": value}))
        with pytest.raises(
            pp.PipelineError, match=r"cannot read the checkpoint .*the losses in about.json are not 2 numbers"
        ):
            alone(folder, steps=3)


# Saves and resumes models of eight layers, in stages whose names are those of the whole model, or the same in each
# stage. The sweep compares with layers that were trained alone, in this process.
STAGES = """
import errno
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from ppedu.run import Checkpoints
warnings.filterwarnings("ignore", "DTensor random operators")  # a remark of PyTorch 2.6 on CPUs

top = Path(sys.argv[1])
teams = {size: dist.new_group(range(size)) for size in (1, 2, 4)}
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zb-v", 2), ("zb-v", 4), ("dualpipe", 2), ("dualpipe", 4)]
SCHEDULES += [("interleaved", 2), ("dualpipev", 2)]

def random_numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def layer(number, seed, kind):
    made = nn.Linear(3, 3 + number % 2 if kind == "other shapes" else 3)  # biases are 0, and so equal
    with torch.no_grad():
        made.weight.copy_(random_numbers(made.weight.shape, seed if kind == "all equal" else seed + number))
        made.bias.zero_()
    return made

def trained(layers, kind, steps=2):
    "Return an optimizer that has stepped these layers, by number."
    optimizer = torch.optim.AdamW([weight for each in layers.values() for weight in each.parameters()], lr=0.1)
    for step in range(steps):
        for number, each in layers.items():
            for weight in each.parameters():
                same = kind == "all equal" or weight.ndim == 1
                weight.grad = like(weight, random_numbers(weight.shape, step if same else step + number))
        optimizer.step()
        for state in optimizer.state.values():
            state["count"] = step + 1  # a number, beside tensors
    return optimizer

def like(weight, value):
    "Return the value sharded like the weight."
    return distribute_tensor(value, weight.device_mesh, weight.placements) if hasattr(weight, "to_local") else value

def state(layers, optimizer):
    found = {}
    for number, each in layers.items():
        for name, weight in each.named_parameters():
            found[number, name] = weight.detach()
            found |= {(number, name, part): value for part, value in optimizer.state[weight].items()}
    locals = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in found.items()}
    return {name: torch.as_tensor(value) for name, value in locals.items()}

def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

def stages(schedule, names, kind, seed):
    "Return this rank's stages, and their layers by number."
    whole = [layer(number, seed, kind) for number in range(8)]
    share = 8 // schedule.stages
    parts = {stage: range(stage * share, stage * share + share) for stage in local_stages(schedule, rank)}
    if names == "cut":
        made = cut(nn.Sequential(*whole), schedule, rank)
    elif names == "of the model":
        made = {s: Of(None, layers=nn.ModuleDict({str(n): whole[n] for n in part})) for s, part in parts.items()}
    else:
        made = {s: Of(None, layers=nn.ModuleList(whole[n] for n in part)) for s, part in parts.items()}
    return made, {number: whole[number] for part in parts.values() for number in part}

def outcome(call):
    try:
        return call()
    except pp.PipelineError as error:
        return str(error)

def on(size, do, *given):
    return outcome(lambda: do(PipelineGroup(rank, size, teams[size]), *given)) if rank < size else None

def save(group, folder, schedule, names, kind, form):
    made, layers = stages(schedule, names, kind, seed=100)
    return Checkpoints(folder, form(made), trained(layers, kind), {}, group).save([0.5, 0.25])

def load(group, folder, schedule, names, kind, form, expected):
    made, layers = stages(schedule, names, kind, seed=200)
    optimizer = trained(layers, kind, steps=0)
    try:
        assert Checkpoints(folder, form(made), optimizer, {}, group).load() == [0.5, 0.25]
    except pp.PipelineError:
        assert not optimizer.state
        raise
    found = state(layers, optimizer)
    assert equal(found, {key: value for key, value in expected.items() if key[0] in layers})

def agreed(text):
    texts = [None] * 4
    dist.all_gather_object(texts, text)
    return texts

FORMS = {
    "by number": dict,
    "as stages": lambda made: {number: Stage(module, number) for number, module in made.items()},
    "listed": lambda made: made.values(),
}
"""

SWEEP = """
drawn = random.Random(0)
counts = {"resumed": 0, "not saved": 0, "not resumed": 0}
for turn in range(int(sys.argv[2])):
    (one, before), (other, after) = drawn.choice(SCHEDULES), drawn.choice(SCHEDULES)
    names = drawn.choice(["cut", "of the model", "of the stage", "of the stage"])
    kind, (form, make) = drawn.choice(["", "other shapes", "all equal"]), drawn.choice([*FORMS.items()])
    first, second = pp.schedule(one, before, 8), pp.schedule(other, after, 8)
    case, folder = (one, before, other, after, names, kind, form), top / str(turn)
    whole = {number: layer(number, 100, kind) for number in range(8)}
    expected = state(whole, trained(whole, kind))
    unique = names != "of the stage" or form != "listed" or first.stages == 1
    texts = agreed(on(before, save, folder, first, names, kind, make))[:before]
    if texts[0]:
        assert set(texts) == {texts[0]} and not unique, (case, texts)
        assert [each.name for each in folder.iterdir()] == ["lock"], case
        counts["not saved"] += 1
        continue
    assert set(texts) == {None} and (unique or kind == "all equal"), (case, texts)
    texts = agreed(on(after, load, folder, second, names, kind, make, expected))[:after]
    if texts[0]:
        assert set(texts) == {texts[0]}, (case, texts)
        assert names == "of the stage" and first.stages != second.stages or not unique, (case, texts)
        counts["not resumed"] += 1
    else:
        counts["resumed"] += 1
    assert agreed(on(before, load, folder, first, names, kind, make, expected))[:before] == [None] * before, case
print(json.dumps(counts))
"""


@pytest.mark.parametrize("turns", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_what_was_saved_is_loaded_in_any_stages_or_refused(ranks, tmp_path, turns):
    (counts, *_) = ranks(BEGIN + OF + STAGES + SWEEP, 4, str(tmp_path), str(turns), timeout=200)
    assert min(json.loads(counts).values()) > 0


REFUSALS = """
zb, pair, both = pp.schedule("zb-v", 2, 4), pp.schedule("1f1b", 2, 4), FORMS["listed"]
texts = {}

def note(case, text):
    texts[case] = agreed(text)[:2]

for kind in "", "other shapes":
    note(f"two ranks {kind}", on(2, save, top / "a", pair, "of the stage", kind, both))
note("one rank", on(2, save, top / "b", zb, "of the stage", "", both))
assert [[each.name for each in (top / name).iterdir()] for name in "ab"] == [["lock"]] * 2

def begin(group):
    made, layers = stages(pair, "of the stage", "", seed=100)
    return Checkpoints(top / "c", made.values(), trained(layers, "", 0), {}, group).load()

note("before training", on(2, begin))

on(4, save, top / "d", pp.schedule("1f1b", 4, 8), "of the stage", "", dict)
expected = state(whole := {number: layer(number, 100, "") for number in range(8)}, trained(whole, ""))
note("other stages", on(2, load, top / "d", pair, "of the stage", "", dict, expected))

def fewer(group):
    made, layers = stages(pair, "of the model", "", seed=200)
    del made[rank].layers["6" if rank else "0"]
    weights = made[rank].parameters()
    return Checkpoints(top / "e", made, torch.optim.AdamW(weights), {}, group).load()

on(2, save, top / "e", pair, "of the model", "", dict)
note("a layer less", on(2, fewer))
note("other layers", on(2, load, top / "e", pair, "of the model", "other shapes", dict, expected))

def replicas(group):
    made = {0: layer(0, rank, "")}
    return Checkpoints(top / "f", made, trained(made, ""), {}, group).save([0.5])

note("replicas", on(2, replicas))

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))["replica"]

def sharded(seed):
    "A layer of stage `rank % 2`, whose slices two replicas hold."
    made = layer(rank % 2, seed, "")
    for name, weight in [*made.named_parameters()]:
        setattr(made, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    return made

def save_sharded(group, folder, form):
    made = {rank % 2: sharded(100)}
    return Checkpoints(folder, form(made), trained(made, ""), {}, group).save([0.5])

def load_sharded(group, folder):
    made = {rank % 2: sharded(200)}
    optimizer = trained(made, "", 0)
    Checkpoints(folder, made, optimizer, {}, group).load()
    expected = {rank % 2: sharded(100)}
    assert equal(state(made, optimizer), state(expected, trained(expected, "")))

assert agreed(on(4, save_sharded, top / "g", dict) or on(4, load_sharded, top / "g")) == [None] * 4
note("slices of two stages", on(4, save_sharded, top / "h", FORMS["listed"]))

class Filling:
    "A file on a disk with `left` bytes of space."
    left = 0
    def __init__(self, file):
        self.file = file
    def write(self, data):
        Filling.left -= len(data)
        if Filling.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()

def save_twice(group, folder, left):
    made, layers = stages(pair, "of the model", "", seed=100)
    checkpoints = Checkpoints(folder, made, trained(layers, ""), {}, group)
    checkpoints.save([0.5, 0.25])
    Filling.left, usual = left, Path.open
    Path.open = lambda path, *given, **more: Filling(usual(path, *given, **more))
    try:
        return outcome(lambda: checkpoints.save([0.5, 0.25, 0.125]))
    finally:
        Path.open = usual

on(2, save_twice, top / "i", 10**9)
whole_size = max(agreed(10**9 - Filling.left)[:2])
for left in 0, 0.3, 0.6, 0.9, 0.999:
    folder = top / f"j{left}"
    note(f"full disk {left}", on(2, save_twice, folder, int(left * whole_size)))
    assert agreed(on(2, load, folder, pair, "of the model", "", dict, expected)) == [None] * 4
print(json.dumps(texts))
"""
CURE = "give Checkpoints the stages as Pipeline takes them, {stage: module}, and names differ by stage"
FULL_DISK = r"cannot (write|use) .*: the disk is full; free some space, or save in another folder"
TOLD = {
    "two ranks ": f"rank 0 and rank 1 hold different tensors with the name 'layers.0.weight', .*, {CURE}; if they are",
    "two ranks other shapes": "rank 0 and rank 1 hold different tensors with the name 'layers.0.weight'",
    "one rank": f"rank 0 holds two weights with the name 'layers.0.weight'; {CURE}",
    "before training": "rank 0 and rank 1 hold different tensors with the name 'layers.0.weight'",
    "other stages": "d/step-2' does not have 'stages.0.layers.2.weight' of shape .3, 3. in torch.float32 as on rank 0",
    "a layer less": "e/step-2' also has 'layers.0.weight', which is on none of the ranks; resume with the stages",
    "other layers": "e/step-2' has 'layers.1.weight' of shape .3, 3. in .*, not of shape .4, 3. in .* as on rank 0;",
    "slices of two stages": "rank 0 and rank 1 hold different tensors with the name 'weight'",
    **{f"full disk {left}": f"{FULL_DISK}$" for left in (0, 0.3, 0.6, 0.9, 0.999)},
    "replicas": "if they are copies of one weight, build them from one seed; slices of one must be DTensors",
}


def test_weights_with_one_name_and_missing_weights_are_reported_on_every_rank(ranks, tmp_path):
    texts = json.loads(ranks(BEGIN + OF + STAGES + REFUSALS, 4, str(tmp_path))[0])
    assert texts.keys() == TOLD.keys()
    for case, (first, second) in texts.items():
        assert first == second and re.search(TOLD[case], first), (case, first, second)
        assert "remove it" not in first


# Two runs, one on each rank: the first is kept in the middle of its training until the second has tried to begin.
TWO_RUNS = """
import json, os, sys, time
from pathlib import Path
import ppedu as pp
from ppedu.course.training.train import TrainConfig, train_gpt

rank = os.environ.pop("RANK")
del os.environ["WORLD_SIZE"]  # each trains alone
config = TrainConfig(**json.loads(sys.argv[1]))
began, tried = (Path(config.save).with_name(name) for name in ("began", "tried"))

def wait(file):
    while not file.exists():
        time.sleep(0.01)

if rank == "0":
    result = train_gpt(config, each=lambda _: (began.touch(), wait(tried)))
    print(json.dumps([os.getpid(), result.losses]))
else:
    wait(began)
    try:
        print(json.dumps(train_gpt(config).losses))
    except pp.PipelineError as error:
        print(json.dumps(str(error)))
    tried.touch()
"""


def test_a_second_run_cannot_use_the_folder_until_the_first_has_ended(ranks, folder, plain):
    output = ranks(TWO_RUNS, 2, json.dumps(SMALL | {"save": str(folder)}))
    (process, losses), told = map(json.loads, output)
    assert losses == plain()[0]
    first = f"another run (process {process} on {socket.gethostname()}) is saving in '{folder}'"
    assert told == f"{first}; wait until it ends, or save in another folder"
    assert alone(folder, steps=6).losses == losses


def alone(folder, **settings):
    """Training in this process."""
    torch.set_num_threads(1)
    return train_gpt(TrainConfig(**SMALL | {"save": str(folder), "steps": 2} | settings))


OTHERS = [
    ({"layers": 6}, "was made with layers 4, not 6; use the same settings, or save in another folder"),
    ({"heads": 4}, "heads 2, not 4"),  # whose weights look the same
    ({"tied": True, "width": 8}, "width 16, not 8 and tied False, not True"),
    ({"context": 4}, "context 8, not 4"),
    ({"seed": 3}, "seed 0, not 3"),
    ({"text": "other.txt"}, r"characters \['x'\], not \['é'\]; use"),  # as many of them
]


def test_a_checkpoint_of_another_model_seed_or_alphabet_is_refused(folder, texts):
    alone(folder)
    for settings, says in OTHERS:
        with pytest.raises(pp.PipelineError, match=says):
            alone(folder, **settings)


FREE = {
    "lr": 1e-3,
    "text": "again.txt",
    "steps": 3,
    "batch": 9,
    "microbatches": 3,
    "clip": 0.5,
    "dtype": "bfloat16",
    "every": 1,
    "schedule": "interleaved",
    "options": {"chunks": 1},
}


def test_settings_that_are_not_part_of_the_model_may_change_between_runs(folder, texts):
    losses = alone(folder).losses
    assert alone(folder, **FREE).losses[:2] == losses


def test_a_finished_training_does_not_run_again(folder, capsys):
    first, again = alone(folder), alone(folder)
    assert again.losses == first.losses and (first.timeline is None, again.timeline is None) == (False, True)
    assert capsys.readouterr().err == f"resuming after step 2, from the checkpoint in {folder}\n"


def test_a_later_checkpoint_is_not_overwritten(folder):
    pipeline = alone(folder).pipeline
    modules = [stage.module for stage in pipeline.stages.values()]
    checkpoints = Checkpoints(folder, modules, torch.optim.AdamW(modules[0].parameters()), model={})
    with pytest.raises(pp.PipelineError, match=f"cannot save step 1 in '{folder}', which holds a checkpoint of step 2"):
        checkpoints.save([0.5])
    assert contents(folder) == ["lock", "step-2"]


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(pp.PipelineError, match=r"cannot save in '.*file/saved'"):
        alone(tmp_path / "file" / "saved")


def blocks(folder, modules, stepped=None):
    """Checkpoints of these modules, and of an optimizer that has stepped their weights once."""
    weights = [weight for module in (stepped or modules) for weight in module.parameters()]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return Checkpoints(folder, modules, optimizer, {})


def test_a_setting_that_only_the_checkpoint_has_is_another_model(folder):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    Checkpoints(folder, [module], optimizer, {"layers": 2, "experts": 4}).save([0.5])
    for fewer, says in (({"layers": 2}, "with experts 4, not None"), ({"experts": 4}, "with layers 2, not None")):
        with pytest.raises(pp.PipelineError, match=says):
            Checkpoints(folder, [module], optimizer, fewer).load()


def test_an_optimizer_of_weights_that_would_not_be_saved_is_refused(folder):
    module, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    with pytest.raises(pp.SettingError, match=r"the optimizer steps a weight of shape \(3, 2\) that is in none of the"):
        blocks(folder, [module], [module, other])
    scaled = type("Scaled", (torch.nn.Linear,), {"get_extra_state": lambda self: {"scale": 2.0}})(2, 2)
    with pytest.raises(
        pp.SettingError, match="'_extra_state' is a dict, and a checkpoint holds tensors only; use a buffer"
    ):
        blocks(folder, [scaled])


def test_a_weight_that_the_state_dict_leaves_out_is_refused(folder):
    module = torch.nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__(f"{prefix}bias"))
    with pytest.raises(pp.SettingError, match=r"of shape \(2,\) that is in none of the modules' state dicts"):
        blocks(folder, [module])


def test_a_weight_that_the_state_dict_renames_is_saved(folder):
    def renamed():
        module = torch.nn.Linear(2, 2)
        module.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(w=state.pop("weight")))
        return module

    module, resumed = renamed(), renamed()
    blocks(folder, [module]).save([0.5])
    assert blocks(folder, [resumed]).load() == [0.5] and torch.equal(resumed.weight, module.weight)


def test_a_checkpoint_in_another_dtype_is_refused(folder):
    blocks(folder, [torch.nn.Linear(2, 2)]).save([0.5])
    says = r"has 'weight' of shape \(2, 2\) in torch.float32, not of shape \(2, 2\) in torch.bfloat16 as on rank 0"
    with pytest.raises(pp.PipelineError, match=says):
        blocks(folder, [torch.nn.Linear(2, 2).bfloat16()]).load()


def test_a_weight_with_the_name_of_optimizer_state_is_refused(folder):
    module = torch.nn.Linear(2, 2)
    module.optimizer = torch.nn.ModuleDict({"weight": torch.nn.Module()})
    module.optimizer["weight"].exp_avg = torch.nn.Parameter(torch.ones(2, 2))
    checkpoints = blocks(folder, [module])
    for call in checkpoints.load, lambda: checkpoints.save([0.5]):
        with pytest.raises(pp.PipelineError, match=r"the name 'optimizer\.weight\.exp_avg', which is that of"):
            call()
    module.optimizer["weight"].exp_avg = None  # other weights of such a module are saved
    module.optimizer.rate = torch.nn.Parameter(torch.ones(2, 2))
    blocks(folder, [module]).save([0.5])


def test_optimizer_state_that_a_checkpoint_cannot_hold_is_refused(folder):
    module = torch.nn.Linear(2, 2)
    checkpoints = blocks(folder, [module])
    state = checkpoints.optimizer.state
    for key, value, says in (
        (module.weight, {"history": [torch.ones(2)]}, "'optimizer.weight.history' is a list; a checkpoint holds"),
        ("all", {"step": 1}, "state of 'all', not of a weight; a checkpoint holds"),
    ):
        state[key] = value
        with pytest.raises(pp.PipelineError, match=f"the optimizer of rank 0 holds what a checkpoint cannot: {says}"):
            checkpoints.save([0.5])
        del state[key]
    checkpoints.save([0.5])


class Counting(torch.optim.Optimizer):
    """Averages gradients; keeps numbers of several kinds."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["n"], state["rate"] = state.get("n", 0) + 1, state.get("rate", 0.3) / 3
            state["odd"], state["none"] = state["n"] % 2 == 1, None
            weight -= weight.grad * state["rate"] / state["n"] * (2 if state["odd"] else 1)


class Odd(torch.nn.Linear):
    """A layer with a count of its forwards as extra state, whose state dict has copies of another shape."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.count = 0
        self.register_state_dict_post_hook(lambda module, state, prefix, _: module.turn(state, prefix))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: module.turn(state, prefix))

    def turn(self, state, prefix):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().clone()

    def get_extra_state(self):
        return torch.tensor(self.count)

    def set_extra_state(self, state):
        self.count = int(state)

    def forward(self, x):
        self.count += 1
        return super().forward(x) / self.count


def new_training(kind, seed):
    """A pipeline of one rank with dropout, all kinds of state, and an optimizer."""
    torch.manual_seed(seed)
    if kind is torch.optim.SparseAdam:
        module = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Dropout())
    else:
        first = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
        module = torch.nn.Sequential(first, Odd(4, 3), torch.nn.Dropout(), torch.nn.BatchNorm1d(3))
    pipe = pp.run.Pipeline(pp.schedule("1f1b", 1, 2), {0: module}, torch.nn.functional.mse_loss, seed=1)
    optimizer = kind(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    return pipe, module, optimizer, pp.run.LossScale(every=2)


def train_on(training, steps):
    pipe, module, optimizer, scale = training
    for step in steps:
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        tokens = isinstance(module[0], torch.nn.Embedding)
        pipe.step(inputs.argmax(1) if tokens else inputs, inputs.roll(1, 0))
        optimizer.step()
        optimizer.zero_grad()
        scale.update(1.0)
    return [each.item() for each in pipe.losses]


OPTIMIZERS = ["SGD", "Adam", "NAdam", "Adadelta", "Adagrad", "ASGD", "Rprop", "Adafactor", "SparseAdam"]


@pytest.mark.parametrize("kind", [*(getattr(torch.optim, name) for name in OPTIMIZERS), Counting])
def test_training_that_resumes_equals_training_without_interruption(tmp_path, kind):
    whole, before, after = (new_training(kind, seed) for seed in (0, 0, 1))
    losses = train_on(whole, range(5))
    train_on(before, range(3))

    def checkpoints(training):
        _, module, optimizer, scale = training
        return Checkpoints(tmp_path, {0: module}, optimizer, {}, states={"loss scale": scale})

    checkpoints(before).save([0.0] * 3)
    pipe = after[0]
    pipe.steps = len(checkpoints(after).load())
    assert train_on(after, range(3, 5)) == losses and after[3].state_dict() == whole[3].state_dict()
    for one, other in zip(whole[1].parameters(), after[1].parameters(), strict=True):
        assert torch.equal(one, other)
        expected, found = whole[2].state[one], after[2].state[other]
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert type(found[name]) is type(value)
            assert torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value


def test_states_that_json_changes_are_refused_and_missing_ones_are_reported(folder):
    module, scale = torch.nn.Linear(2, 2), pp.run.LossScale(4.0)
    optimizer = torch.optim.SGD(module.parameters())
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    with pytest.raises(pp.PipelineError, match="the state of 'rate' cannot be saved; a checkpoint holds JSON values"):
        Checkpoints(folder, [module], optimizer, {}, states={"rate": milestones}).save([0.5])
    Checkpoints(folder, [module], optimizer, {}, states={"scale": scale}).save([0.5])
    with (
        pytest.warns(UserWarning, match="step-1' has a state of 'scale', so training resumes without it"),
        pytest.warns(UserWarning, match="only this run has a state of 'other', so training"),
    ):
        assert Checkpoints(folder, [module], optimizer, {}, states={"other": scale}).load() == [0.5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_training_run_that_resumes_equals_one_without_interruption(folder, monkeypatch, dtype):
    drawn = random.Random(dtype)
    # The first steps overflow, so that it matters how far the scale has fallen.
    monkeypatch.setattr("ppedu.course.training.train.LossScale", lambda: pp.run.LossScale(2.0**26, every=2))
    settings = {
        "dtype": dtype,
        "schedule": drawn.choice(["gpipe", "1f1b", "zb-h1"]),
        "clip": drawn.choice([None, 0.5]),
        "recompute": drawn.random() < 0.5,
        "every": drawn.randrange(1, 4),
        "layers": 1,
        "microbatches": 2,
        "batch": 2,
    }
    expected = alone(folder, **settings | {"save": None, "steps": 12})
    for steps in (*sorted(drawn.sample(range(4, 12), 2)), 12):
        found = alone(folder, **settings | {"steps": steps})
    assert found.losses == expected.losses
    for one, other in zip(*(each.pipeline.stages[0].module.parameters() for each in (expected, found)), strict=True):
        assert torch.equal(one, other)


def test_a_module_that_is_listed_twice_is_saved_once(folder):
    module = torch.nn.Linear(2, 2)
    blocks(folder, [module, module], [module]).save([0.5])
    resumed = torch.nn.Linear(2, 2)
    assert blocks(folder, [resumed]).load() == [0.5] and torch.equal(resumed.weight, module.weight)


def test_an_empty_name_of_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pp.SettingError, match=r"a file name must not be empty; '\.' is the current folder"):
        blocks("", [torch.nn.Linear(2, 2)])
    assert contents(tmp_path) == []
