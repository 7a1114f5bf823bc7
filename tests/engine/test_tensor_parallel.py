"""Pipeline, data and tensor parallelism together: gradients and clipping are those of one process."""

import pytest
from cases import BEGIN

PROGRAM = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
warnings.filterwarnings("ignore", "DTensor random operators")  # a remark of PyTorch 2.6 on CPUs

ranks, replicas, tensor = map(int, sys.argv[1:])
mesh = init_device_mesh("cpu", (ranks, replicas, tensor), mesh_dim_names=("pipeline", "replicas", "tensor"))
rank, replica, _ = mesh.get_coordinate()

def layer(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

def cut(module):
    "Share the weights of a stage out over the ranks that compute it together."
    if tensor > 1:
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.ones(16, 6)
for name in ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]:
    schedule = pp.schedule(name, ranks, 4)
    model = nn.ModuleDict({str(stage): layer(stage) for stage in range(schedule.stages)})
    x = X
    for module in model.values():
        x = module(x)
    loss = fn.mse_loss(x, Y)
    loss.backward()
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    group = PipelineGroup(rank, ranks, mesh["pipeline"].get_group())
    beside = mesh["replicas"].get_group() if replicas > 1 else None
    stages = {stage: cut(layer(stage)) for stage in local_stages(schedule, rank)}
    pipeline = Pipeline(schedule, stages, fn.mse_loss, group, replicas=beside, timeout=20)
    found = pipeline.step(X.chunk(replicas)[replica], Y.chunk(replicas)[replica])
    norm = pipeline.clip_grad_norm(0.1)
    assert torch.allclose(found, loss) and abs(norm - expected_norm) < 1e-5, (name, found, loss, norm, expected_norm)
    for stage, module in stages.items():
        for ours, theirs in zip(module.parameters(), model[str(stage)].parameters(), strict=True):
            grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(grad, theirs.grad)
            assert tensor == 1 or name != "gpipe" or hasattr(ours.grad, "full_tensor")
print("fine")
dist.barrier()
"""
SIZES = [(2, 2, 1), (2, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "×".join(map(str, size)))
def test_gradients_are_those_of_one_process(ranks, size):
    pipeline, replicas, tensor = size
    processes = pipeline * replicas * tensor
    assert ranks(BEGIN + PROGRAM, processes, *map(str, size), timeout=120) == ["fine\n"] * processes
