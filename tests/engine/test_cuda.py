"""The engine on a GPU. Each test is a row of the table that `make gpu` prints, with the lines that the test tells.

On a machine without a GPU, `make gpu` runs the same programs on the CPU, except those that need a GPU or two. Most are
marked slow, since other files test the same on the CPU in less time.
"""

import textwrap

import pytest
from bench_engine import BY_GPU, measure
from llama import LLAMA, LlamaBlock
from on_device import PRELUDE

import ppedu as pp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
slow = pytest.mark.slow

GPUS = torch.cuda.device_count()
needs_a_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a GPU that PyTorch can use")
WHOLE = [name for name in pp.schedules() if pp.schedule(name, 4, 8).plain]
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs a GPU for each of 2 ranks")
BACKENDS = ["gloo", pytest.param("nccl", marks=needs_two_gpus)]
PAIRS = ["1f1b-overlap", "interleaved-overlap", "dualpipe", "dualpipev"]
LIMIT = 60.0  # seconds for the ranks of a test; a GPU may take 20 to start


@pytest.fixture
def show(ranks, tell):
    """Return `show(program, n, *arguments)`, which runs a program on n ranks; the table gets the lines they tell."""

    def run(program, n, *arguments, timeout=LIMIT):
        for text in ranks(PRELUDE + textwrap.dedent(program), n, *arguments, timeout=timeout):
            for line in text.splitlines():
                if line.startswith("tell: "):
                    tell(line.removeprefix("tell: "))

    return run


@slow
def test_the_device_computes(show):
    show(
        """
        tell(f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}, ppedu {pp.__version__}")
        if device.type == "cuda":
            of, driver = torch.cuda.get_device_properties(device), Path("/proc/driver/nvidia/version")
            tell(f"{torch.cuda.device_count()} × {of.name}, {of.total_memory / 2**30:.0f} GiB, {of.major}.{of.minor}")
            tell(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
            if driver.exists():
                tell(f"driver {re.search('[0-9]+[.][0-9.]+', driver.read_text())[0]}")
        else:
            tell("no GPU that PyTorch can use, so everything ran on the CPU")
        torch.testing.assert_close(layer(0)(x).cpu(), layer(0).cpu()(x.cpu()), rtol=1e-4, atol=1e-4)
        """,
        1,
    )


@slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", *PAIRS])
def test_gradients_on_two_ranks_are_those_of_one_process(show, name):
    show(f"assert run({name!r}).timeline.makespan > 0", 2)


@slow
def test_gradients_of_every_schedule_on_four_ranks_are_those_of_one_process(show):
    show(
        """
        wrong = {}
        for name in WHOLE:
            group = PipelineGroup(rank, size, dist.new_group(range(size)))
            try:
                run(name, group=group, steps=2, timeout=20)
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {error}"
        assert not wrong, wrong
        """,
        4,
        "gloo",
        timeout=2 * LIMIT,
    )


@slow
def test_a_step_on_one_rank_is_bit_for_bit_that_of_one_process(show):
    show(
        """
        pipeline, judge = make("1f1b"), one_process(1)[0]
        pipeline.step(x, y)
        for ours, theirs in zip(pipeline.stages[0].module.parameters(), judge[0].parameters()):
            assert torch.equal(ours.grad, theirs.grad), (ours.grad - theirs.grad).abs().max()
        alone = lambda: one_process(1, lambda stage: judge[stage])
        times = [(seconds(lambda: pipeline.step(x, y)), seconds(alone)) for _ in range(25)]
        ours, theirs = map(median, zip(*times[5:]))
        tell(f"{ours * 1e3:.2f} ms a step; one process without a pipeline {theirs * 1e3:.2f} ms")
        """,
        1,
    )


@needs_a_gpu
@pytest.mark.parametrize("name", PAIRS)
def test_a_slow_kernel_does_not_change_the_gradients_of_pairs(show, name):
    """A stream that reads a tensor before the other stream has written it gets wrong numbers."""
    show(f"run({name!r}, cycles=20_000_000, steps=2)", 2)


@needs_a_gpu
def test_the_two_parts_of_a_pair_run_at_the_same_time(show):
    show(
        """
        def median_of(op):
            return median(span.end - span.start for span in spans if span.action.op == op)
        pipeline = make("gpipe", cycles=20_000_000)
        for _ in range(2):
            pipeline.step(x, y)
        spans = pipeline.timeline.spans(0)
        forward, backward = median_of(pp.Op.F), median_of(pp.Op.B)
        pipeline = make("1f1b-overlap", cycles=20_000_000)
        for _ in range(2):
            pipeline.step(x, y)
        spans = pipeline.timeline.spans(0)
        pair = median_of(pp.Op.OVERLAP_F_B)
        tell(f"forward {forward * 1e3:.1f} ms, backward {backward * 1e3:.1f} ms, both in a pair {pair * 1e3:.1f} ms")
        assert pair < 0.8 * (forward + backward), (pair, forward, backward)
        """,
        1,
    )


@needs_a_gpu
def test_steps_cause_no_warnings(show):
    """Not even the first, whose backward begins on rank 0 with a matrix product."""
    show(
        f"""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make("1f1b").step(x, y)
            for name in {PAIRS}:
                run(name, steps=2)
        assert not found, [str(each.message) for each in found]
        """,
        2,
    )


@slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("bfloat16", 5e-2)])
def test_gradients_in_mixed_precision_are_those_of_one_process(show, dtype, tolerance):
    show(f'run("1f1b", autocast=torch.{dtype}, tolerance={tolerance})', 2)


@slow
def test_recomputed_stages_drop_the_same_numbers_and_keep_less(show):
    show(
        """
        def dropping(stage):
            return layer(stage).append(nn.Dropout(0.5))
        def train(recompute):
            "Return the gradients of a step, and on a GPU the most bytes of its activations."
            pipeline = make("gpipe", dropping, recompute=recompute, seed=3)
            memory = Memory(pipeline)
            for _ in range(2):
                clear(pipeline)
                pipeline.steps = 0
                pipeline.step(x, y)
            memory.close()
            gradients = [weight.grad for stage in pipeline.stages.values() for weight in stage.module.parameters()]
            return gradients, memory.peak
        (expected, most), (found, less) = train(False), train(True)
        for one, other in zip(expected, found):
            torch.testing.assert_close(one, other)
        tell(f"{most / 1e6:.1f} MB, with recomputation {less / 1e6:.1f} MB")
        assert less < most, (less, most)
        """,
        2,
    )


@slow
def test_steps_that_are_validated_later_drop_the_same_numbers(show):
    """Each step is clipped, so the forwards that began too early run again, with the random numbers of before."""
    show(
        """
        def train(validated):
            pipeline = make("1f1b", lambda stage: layer(stage).append(nn.Dropout(0.5)))
            modules = [stage.module for stage in pipeline.stages.values()]
            weights = [weight for module in modules for weight in module.parameters()]
            optimizer = torch.optim.SGD(weights, 1.0)
            if validated:
                later = PostValidation(optimizer, 1e-3)
                pipeline = Pipeline(pipeline.schedule, pipeline.stages, mse_loss, optimizer=later)
            torch.manual_seed(7 + rank)
            for step in range(4):
                pipeline.step(x, y)
                if not validated:
                    assert pipeline.clip_grad_norm(1e-3) > 1e-3  # so each step is clipped
                    optimizer.step()
                    optimizer.zero_grad()
            if validated:
                pipeline.flush()
            return weights
        for one, other in zip(train(False), train(True)):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
        """,
        2,
    )


@pytest.mark.parametrize("names", [["zb-v"], pytest.param(["interleaved", "dualpipev"], marks=slow)])
def test_a_first_stage_without_weights_computes_where_its_inputs_are(show, names):
    show(
        f"""
        seen = set()
        def without_weights(stage):
            if stage:
                return layer(stage)
            made = nn.ReLU()
            made.register_forward_hook(lambda module, inputs, output: seen.update((inputs[0].device, output.device)))
            return made
        for name in {names!r}:
            pipeline = run(name, without_weights)
            assert pipeline.device == device, pipeline.device
        assert seen == {{device}}, seen
        """,
        2,
    )


@slow
@pytest.mark.parametrize(
    "name", [pytest.param("nccl", marks=needs_a_gpu), pytest.param("cpu:gloo,cuda:nccl", marks=needs_a_gpu), ""]
)
def test_process_groups_may_have_any_backend_or_none(show, name):
    """With one GPU, NCCL has one rank, and averages gradients over one replica."""
    show(
        """
        total = torch.full((1000,), rank + 1.0, device=device)
        dist.all_reduce(total)
        assert total.sum() == 1000 * size * (size + 1) / 2, total.sum()
        run("1f1b", replicas=dist.group.WORLD if size == 1 else None)
        """,
        1 if GPUS == 1 else 2,
        name,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_clocks_of_ranks_on_one_machine_agree(show, backend):
    """The ranks compare their clocks as if they were on two machines; the offset is 0, to within the error."""
    show(
        """
        clock.machine = lambda: rank
        clocks = run("1f1b").clocks
        tell(f"{dist.get_backend()}: offset {clocks.offset * 1e6:.1f} µs ± {clocks.error * 1e6:.1f} µs", by=1)
        assert abs(clocks.offset) <= clocks.error < 0.1, vars(clocks)
        """,
        2,
        backend,
    )


@needs_a_gpu
def test_the_clock_measures_the_gpu_and_not_the_launch_of_its_kernels(show):
    """An action whose kernels sleep lasts as long as they do, by an event of torch around one of them."""
    show(
        """
        cycles = 50_000_000
        spans = run("gpipe", cycles=cycles, steps=2).timeline.spans(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); torch.cuda._sleep(cycles); end.record()
        torch.cuda.synchronize()
        sleep = start.elapsed_time(end) / 1000
        forward, backward = (median(s.end - s.start for s in spans if s.action.op == op) for op in "FB")
        numbers = [f"{each * 1e3:.1f} ms" for each in (sleep, forward, backward)]
        tell("a kernel takes {}, a forward with 3 of them {}, a backward with 2 {}".format(*numbers))
        for span in spans:
            kernels = 3 if span.action.op == pp.Op.F else 2  # the batch wants no gradient from the first layer
            assert 0.9 * kernels * sleep < span.end - span.start < 2 * kernels * sleep, (span, sleep)
        for before, after in zip(spans, spans[1:]):
            assert before.end <= after.start + 1e-4, (before, after)
        """,
        1,
    )


@needs_a_gpu
@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_a_trace_tells_the_times_of_the_clock(show, tmp_path, name):
    """The times of kernels that torch.profiler writes are those of the marks before and after each action."""
    show(
        f"""
        pipeline = make({name!r}, cycles=5_000_000)
        lines = []
        def steps(number):
            for _ in range(number):
                pipeline.step(x, y)
                lines.append(pipeline.timeline)
        steps(2)
        with profile() as profiler:
            steps(3)
        profiler.export_chrome_trace({str(tmp_path / "rank0.json")!r})
        run = pp.Run.load({str(tmp_path)!r})
        assert not run.remarks, run.remarks
        off = []
        for step, line in enumerate(lines[-3:]):
            spans = {{span.action: span for span in run.timeline(step=step).spans(0)}}
            for span in line.spans(0):
                ours, theirs = (each.end - each.start for each in (span, spans[span.action]))
                off.append(abs(ours - theirs))
        tell(f"{{len(off)}} actions, at most {{max(off) * 1e6:.0f}} µs apart")
        assert max(off) < 1e-3, off
        """,
        1,
    )


@needs_a_gpu
def test_the_bytes_that_are_counted_are_those_that_the_gpu_keeps(tell):
    shape = 1, LLAMA["sequence"], LLAMA["width"]
    with torch.device("meta"):
        example = torch.zeros(shape, dtype=torch.bfloat16)
        counted = pp.Model.of(torch.nn.Sequential(LlamaBlock(**LLAMA).bfloat16()), example).pieces[0].activation
    block, x = LlamaBlock(**LLAMA).bfloat16().cuda(), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    block(x)  # the first call also allocates what the libraries need
    before = torch.cuda.memory_allocated()
    y = block(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
    tell(f"{kept:,} bytes, counted {counted:,}")
    assert kept == pytest.approx(counted, rel=1e-4)


@needs_a_gpu
def test_memory_by_action_is_what_the_gpu_allocates(show):
    """A forward keeps at least what autograd saves; after the step only the gradients remain."""
    show(
        """
        pipeline = make("gpipe")
        memory = Memory(pipeline)
        for _ in range(2):
            clear(pipeline)
            pipeline.step(x, y)
        # Of a microbatch: the outputs of the first layer and of GELU, and what has come from the other rank.
        saved = 8 * 4 * (2048 + 2048 + 512 * (rank > 0))
        after = [0, *(memory.after[pp.F(rank, m)] for m in range(8))]
        for before, now in zip(after, after[1:]):
            assert now - before >= saved, (before, now, saved)
        gradients = sum(4 * weight.numel() for weight in pipeline.stages[rank].module.parameters())
        kept = memory.after[pp.B(rank, 7)]
        assert gradients <= kept < gradients + 8 * saved, (gradients, kept, saved)
        assert memory.peak >= max(memory.after.values()) and len(memory.curve()) == 17
        """,
        2,
    )


@needs_a_gpu
def test_a_report_claims_the_memory_that_the_gpu_allocates(show):
    show(
        """
        report = Report()
        config, result = train(4, report, width=256, context=128, batch=32)
        most = torch.tensor(torch.cuda.max_memory_allocated(device))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        line = report.lines(config, result, 97)[-1]
        number, unit = re.search("fullest, with ([0-9.]+) ([kMG]?B)", line).groups()
        claimed = float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
        tell(f"{claimed / 1e6:.1f} MB of {most / 1e6:.1f} MB")
        assert 0.9 * most < claimed < 1.01 * most, line  # it is rounded
        """,
        2,
        "gloo",
    )


@slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_training_resumes_with_the_same_losses(show, tmp_path, dtype):
    show(
        f"""
        settings = dict(schedule="zb-v", every=2, dtype={dtype!r})
        whole = train(6, **settings)[1].losses
        train(4, save={str(tmp_path)!r}, **settings)
        resumed = train(6, save={str(tmp_path)!r}, **settings)[1].losses
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole), rtol=1e-4, atol=0)
        """,
        2,
    )


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_is_never_sent_is_an_error_within_the_timeout(show, backend):
    show(
        """
        pipeline = ready(timeout=6)
        instead_of_second_message(pipeline, lambda: None)
        start = time.monotonic()
        try:
            pipeline.step(x, y)
        except pp.CommunicationError:
            took = time.monotonic() - start
            tell(f"{dist.get_backend()}: an error after {took:.1f} s, with a timeout of 6 s", by=1)
            assert took < 12, took
        else:
            raise AssertionError("a step ended without one of its messages")
        """,
        2,
        backend,
    )


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hang_report_names_the_message_that_a_rank_waits_for(show, backend):
    with pytest.raises(pp.RankError, match=r"rank 1.*1F1.*1RECV_F1.*from rank 0"):
        show(
            """
            pipeline = ready(timeout=600)
            instead_of_second_message(pipeline, lambda: time.sleep(600))
            pipeline.step(x, y)
            """,
            2,
            backend,
            timeout=25 if GPUS else 10,
        )


@slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_receives_may_be_posted_early_or_late(show, backend):
    show(
        """
        plain = pp.schedule("1f1b", size, 8)
        pipelines = [make(pp.lower(plain, receive=when)) for when in ("early", "late")]
        times = [[seconds(lambda: each.step(x, y)) for each in pipelines] for _ in range(25)]
        early, late = map(median, zip(*times[5:]))
        tell(f"{dist.get_backend()}: a step takes {early * 1e3:.2f} ms early, {late * 1e3:.2f} ms late")
        """,
        2,
        backend,
    )


@needs_two_gpus
def test_stages_on_another_gpu_than_the_current_one_work_or_are_refused(show):
    show(
        """
        torch.cuda.set_device(0)
        device = torch.device("cuda", rank)
        x, y = x.to(device), y.to(device)
        try:
            run("1f1b", timeout=10)
            tell("they work")
        except pp.PipelineError as error:
            assert rank == 0 or "set_device" in str(error), error
            tell(f"refused: {error}", by=1)
        """,
        2,
        "nccl",
    )


@slow
@pytest.mark.parametrize("name", BY_GPU)
def test_the_engine_beside_torchs_runtime(rank_pool, tell, name):
    tell(f"{name}: {measure(rank_pool, name, min(GPUS, 4) or 2, rounds=45 if GPUS else 5, gpu=True)}")


@needs_two_gpus
@pytest.mark.parametrize("name", WHOLE)
def test_gradients_over_nccl_are_those_of_one_process(show, name):
    show(f"run({name!r})", 4 if GPUS > 3 else 2, "nccl")
