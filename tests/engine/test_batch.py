"""Batches are cut along their samples; loss and gradients are those of one forward of the whole batch."""

import re
import warnings
from collections import UserDict
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import often
from torch import nn
from torch.distributed.pipelining import microbatch as torchs
from torch.nn import functional as fn
from torch.utils._pytree import tree_flatten

import ppedu as pp
from ppedu.engine.batch import Batch
from ppedu.run import Batching, Pipeline


def tokens(*shape, most=7):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@often(100)
@given(st.integers(1, 6), st.integers(0, 9), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_batch_is_cut_evenly_and_completely(microbatches, more, shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = microbatches + more
    whole = tokens(*shape)
    batching = Batching(input_dims={0: dim, 1: 5, 2: None, "mask": dim})
    batch = Batch.cut((whole, "all", whole), None, {"mask": whole}, microbatches, batching)
    pieces = [each[0] for each in batch.inputs]
    sizes = [piece.shape[dim] for piece in pieces]
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1 and len(sizes) == microbatches
    assert all(each[1] == "all" and each[2] is whole for each in batch.inputs)
    assert all(torch.equal(named["mask"], piece) for named, piece in zip(batch.keywords, pieces, strict=True))
    assert batch.targets == [] and batch.counts == [] and batch.sizes == sizes


@st.composite
def nests(draw, samples, depth=2):
    """Draw tensors and other values in tuples, lists and dicts, and the dimensions to cut along, nested alike."""
    kind = draw(
        st.sampled_from(["tensor", "tensor", "other", "tuple", "dict", "list"] if depth else ["tensor", "other"])
    )
    if kind == "other":
        return draw(st.sampled_from([None, 3, "text", 0.5])), draw(st.sampled_from([0, None]))
    if kind == "tensor":
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        dim = draw(st.integers(0, len(shape)))
        whole = tokens(*shape[:dim], samples, *shape[dim:], most=1000)
        return whole, draw(st.sampled_from([dim, dim - whole.dim(), None]))
    several = draw(st.lists(nests(samples, depth - 1), min_size=1, max_size=3))
    values, dims = zip(*several, strict=True)
    if kind == "dict":
        return dict(zip("abc", values, strict=False)), dict(zip("abc", dims, strict=False))
    make = tuple if kind == "tuple" else list
    return make(values), make(dims)


def chunk_specs(value, dims):
    """Return the dimensions in torch's form: a TensorChunkSpec for each tensor that is cut."""
    if isinstance(value, (tuple, list, dict)):
        keys = value if isinstance(value, dict) else range(len(value))
        found = {key: chunk_specs(value[key], dims[key]) for key in keys}
        return found if isinstance(value, dict) else type(value)(found.values())
    if dims is None or not isinstance(value, torch.Tensor):
        return torchs._Replicate
    return torchs.TensorChunkSpec(dims)


def same(one, other):
    (ones, form), (others, like) = tree_flatten(one), tree_flatten(other)
    assert form == like
    for left, right in zip(ones, others, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@often(200)
@given(st.integers(1, 4), st.integers(0, 5), st.data())
def test_nested_batches_are_cut_as_torch_cuts_them_and_joined_again(microbatches, more, data):
    samples = microbatches + more
    # A list in the place of an argument is cut already, so there they stand one level deeper.
    nest = nests(samples).map(lambda pair: ({"x": pair[0]}, {"x": pair[1]}))
    arguments = data.draw(st.lists(nest, min_size=1, max_size=2))
    mask, mask_dims = data.draw(nest)
    inputs, dims = zip(*arguments, strict=True)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(inputs)[0]):
        inputs, dims = (*inputs, tokens(samples)), (*dims, 0)
    theirs, named = torchs.split_args_kwargs_into_chunks(
        inputs,
        {"mask": mask},
        microbatches,
        chunk_specs(inputs, dims),
        chunk_specs({"mask": mask}, {"mask": mask_dims}),
    )
    batching = Batching(input_dims=dict(enumerate(dims)) | {"mask": mask_dims}, output_dim=dims)
    batch = Batch.cut(inputs, None, {"mask": mask}, microbatches, batching)
    same(list(batch.inputs), theirs)
    same(list(batch.keywords), named)

    # Where nothing went to every microbatch as a whole, the pieces join to the whole.
    leaves = tree_flatten(inputs)[0]
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves) and not any(dim is None for dim in tree_flatten(dims)[0]):
        same(batching.join(batch.inputs), inputs)


def test_outputs_other_than_tensors_are_listed_and_scalars_are_stacked():
    outputs = [{"loss": torch.tensor(1.0 * m), "name": m, "y": (torch.full((m + 1,), m),)} for m in range(3)]
    found = Batching().join(outputs)
    same(found, {"loss": torch.arange(3.0), "name": [0, 1, 2], "y": (torch.tensor([0, 1, 1, 2, 2, 2]),)})


class Model(nn.Module):
    """A model that takes all forms of inputs of these tests, with samples along various dimensions."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x, turned=None, factor=1, *, scale=None, table=None, more=None):
        if isinstance(x, dict):
            x, turned = x["tokens"], x["turned"][0]
        if more is not None:
            scale, table = more
        x = self.token(x)
        x = x if turned is None else x + turned.transpose(0, 1)
        x = x if scale is None else x * scale.permute(2, 0, 1)
        x = x if table is None else x + table
        return self.head(x * factor)


def loss(logits, targets):
    targets = targets["y"][0] if isinstance(targets, dict) else targets
    return fn.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def counted(targets):
    return (targets != -100).sum()


def padded(*lengths):
    """Return rows of 6 targets, of which the first `length` count."""
    targets = tokens(len(lengths), 6)
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return targets


X, Y = tokens(7, 6), tokens(7, 6)
TURNED, SCALE, TABLE = numbers(6, 7, 4), numbers(6, 4, 7), numbers(6, 4)


def uneven(whole, dim=0):
    return list(whole.split([1, 4, 2], dim))


CUT = {  # inputs, targets, keywords, settings of Batching; the same in one piece, for the reference
    "whole tensors": ((X, Y, {}, {}), (X, Y, {})),
    "several arguments, each along its own dimension": (
        ((X, TURNED, 2), Y, {"scale": SCALE, "table": TABLE}, {"input_dims": {1: 1, "scale": -1, "table": None}}),
        ((X, TURNED, 2), Y, {"scale": SCALE, "table": TABLE}),
    ),
    "targets along another dimension": ((X, Y.t(), {}, {"target_dim": 1}), (X, Y, {})),
    "tokens that do not count": (
        (X, padded(6, 1, 2, 5, 3, 6, 1), {}, {"count": counted}),
        (X, padded(6, 1, 2, 5, 3, 6, 1), {}),
    ),
    "a microbatch where none counts": (
        (X, padded(3, 4, 1, 0, 0, 6, 1), {}, {"count": counted}),
        (X, padded(3, 4, 1, 0, 0, 6, 1), {}),
    ),
    "lists, cut unevenly": (
        (uneven(X), uneven(Y), {"scale": uneven(SCALE, -1), "table": TABLE}, {"input_dims": {"table": None}}),
        (X, Y, {"scale": SCALE, "table": TABLE}),
    ),
    "dicts and tuples": (
        (
            {"tokens": X, "turned": (TURNED, "name")},
            {"y": (Y,)},
            {"more": (SCALE, TABLE)},
            {"input_dims": {0: {"turned": (1,)}, "more": (-1, None)}},
        ),
        ({"tokens": X, "turned": (TURNED,)}, {"y": (Y,)}, {"more": (SCALE, TABLE)}),
    ),
    "a list of arguments": (
        (list(zip(uneven(X), uneven(TURNED, 1), strict=True)), uneven(Y), {}, {}),
        ((X, TURNED), Y, {}),
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_loss_and_gradients_are_those_of_the_whole_batch(case):
    (inputs, targets, keywords, options), (x, y, named) = CUT[case]
    models = [Model().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def ours(output, target):
        return loss(output, target.t() if "target_dim" in options else target)

    pipeline = Pipeline(
        pp.schedule("gpipe", ranks=1, microbatches=3), {0: models[0]}, ours, batching=Batching(**options)
    )
    found = pipeline.step(inputs, targets, **keywords)
    expected = loss(models[1](*(x if isinstance(x, tuple) else (x,)), **named), y)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@often(100)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=8), st.sampled_from([1, 2, 3]))
def test_padding_that_makes_sizes_wrong_weights_is_noticed(lengths, microbatches):
    lengths[0] = 6
    pieces = padded(*lengths).tensor_split(microbatches)
    counted = [sum(token >= 0 for row in piece.tolist() for token in row) for piece in pieces]
    right = [Fraction(count, sum(counted)) for count in counted]
    by_size = [Fraction(len(piece), len(lengths)) for piece in pieces]
    assert Batching().ignores_unevenly([{"y": piece} for piece in pieces]) == (right != by_size)
    for batching in (Batching(count=len), Batching(reduction="sum")):
        assert not batching.ignores_unevenly(pieces)
    assert not Batching().ignores_unevenly([piece.double() for piece in pieces])


def test_uneven_padding_is_a_warning_once_for_a_pipeline():
    def make(**options):
        return Pipeline(pp.schedule("1f1b", 1, 2), {0: Model()}, loss, batching=Batching(**options))

    inputs, targets = tokens(4, 6), padded(6, 6, 6, 2)
    pipeline = make()
    with pytest.warns(UserWarning, match=re.escape("Batching(count=lambda y: int((y != -100).sum()))")) as found:
        pipeline.step(inputs, targets)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.eval(inputs, targets)
        make().step(inputs, padded(6, 3, 6, 3))
        for options in ({"count": counted}, {"count": torch.numel}, {"reduction": "sum"}):
            make(**options).step(inputs, targets)


def given(inputs=X, targets=Y, keywords=None, **settings):
    return inputs, targets, keywords or {}, settings


TOO_FEW = "cannot be cut into 3 microbatches along dimension 0"
REFUSED = {
    "too few samples": (given(X[:2]), f"input 0 of shape (2, 6) {TOO_FEW}"),
    "too few targets": (given(X, Y[:2]), f"targets of shape (2, 6) {TOO_FEW}"),
    "no such dimension": (given(input_dims={0: 2}), "input 0 of shape (7, 6) cannot be cut into 3 microbatches along"),
    "a number as a tensor": (
        given(keywords={"scale": torch.tensor(2.0)}),
        f"scale of shape () {TOO_FEW}; give at least 3 samples, or all of it to each microbatch with "
        "Batching(input_dims={'scale': None}), or use fewer microbatches",
    ),
    "another number of samples": (
        given((X, TURNED)),
        "input 1 has 6 samples along dimension 0, but input 0 has 7; "
        "give the same number, or all of it to each microbatch with Batching(input_dims={1: None})",
    ),
    "a list of another length": (given(uneven(X)[1:]), "input 0 is a list of 2 microbatches, but the schedule has 3"),
    "a keyword's list": (given(keywords={"scale": [1, 2]}), "scale is a list of 2 microbatches, but the schedule has"),
    "targets without a tensor": (
        given(X, (1, "two")),
        "targets must be a tensor, a tuple or dict of tensors, or a list with those of each microbatch; got tuple",
    ),
    "tensors in an object": (
        given({"a": UserDict(x=X)}),
        "input 0['a'] is a UserDict, whose tensors cannot be cut; give them in a dict or tuple, or all",
    ),
    "tensors of other sizes in a dict": (
        given({"a": X, "b": (TURNED,)}),
        "input 0['b'][0] has 6 samples along dimension 0, but input 0['a'] has 7",
    ),
    "a sparse tensor": (given(X.to_sparse()), "input 0 is sparse and cannot be cut; give to_dense(), or a list"),
    "no dimension": (given(input_dims={0: "first"}), "the dimension to cut input 0 along must be a whole number"),
    "no target counts": (
        given(X, padded(0, 0, 0, 0, 0, 0, 0), count=counted),
        "count [0, 0, 0]; Batching(count=…) must return whole numbers, at least one of them above 0",
    ),
    "targets count by halves": (
        given(count=lambda y: 0.5),
        "count [0.5, 0.5, 0.5]; Batching(count=…) must return whole numbers",
    ),
    "targets count less than nothing": (
        given(count=lambda y: -1),
        "count [-1, -1, -1]; Batching(count=…) must return whole numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_cannot_be_cut_is_refused_with_the_reason(case):
    (inputs, targets, keywords, options), why = REFUSED[case]
    with pytest.raises(pp.SettingError, match=re.escape(why)):
        Batch.cut(inputs, targets, keywords, 3, Batching(**options))


def test_a_kind_stands_for_shapes_and_dtypes():
    def kinds(*inputs, **keywords):
        return Batch.cut(inputs, None, keywords, 3).kinds(3)

    first = kinds(X)
    assert first[0] != first[1] == first[2] and min(first) > 0  # 3 samples, 2 and 2
    assert kinds(X + 1) == first
    assert kinds(X, scale=X)[1:] != kinds(X, scale=X.double())[1:]
    assert not set(first) & {*kinds(X[:, :5]), *kinds(X.double()), *kinds(X, X), *kinds(X, 1), *kinds(X, scale=X)}
    assert Batch.cut(None, Y, {}, 3).kinds(3) == [0, 0, 0]
